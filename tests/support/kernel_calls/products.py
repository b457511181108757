"""Drawn products (gemm.c, grouped.c, skinny_gemm.c), and how far they may be from those of float64."""

from __future__ import annotations

import ctypes

import torch

from megatron_fp8.kernels.cpu import emulation, grouped, skinny_gemm
from megatron_fp8.numerics.cast import decode

from . import fp4
from . import numbers as of
from .elementwise import FORMATS
from .numbers import Draw
from .tape import Buffer, Call

RESULTS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
SCALES = ("tensor", "row", "32 x 32", "128 x 128", "1 x 32", "1 x 128", "7 x 96")
POISON = 0xA5


def _laid_out(x: torch.Tensor, draw: Draw, dense: bool = False) -> tuple[torch.Tensor, int, int]:
    """(the bytes where a matrix lies, its row step, its column step): by rows or columns, maybe part of a wider one."""
    turned, wider = not dense and bool(draw.integers(2)), 0 if dense else int(draw.choice([0, 0, 5]))
    x = x.t() if turned else x
    step = x.shape[1] + wider
    whole = torch.empty(x.shape[0] * step, dtype=x.dtype)
    whole.view(torch.uint8).fill_(POISON)
    whole.view(x.shape[0], step)[:, : x.shape[1]] = x
    end = max(0, x.shape[0] * step - wider)
    return whole[:end].clone(), *((1, step) if turned else (step, 1))


def _side(draw: Draw, rows: int, k: int, e5m2: bool, special: bool) -> tuple[Buffer, torch.Tensor, str]:
    """(gemm.c's Side, what it stands for in float64, in words)"""
    if draw.random() < 0.15:
        x = torch.randn(rows, k, generator=of.seeded(draw)).bfloat16()
        x[torch.rand(rows, k, generator=of.seeded(draw)) < 0.1] = -0.0
        data, row_step, k_step = _laid_out(x, draw)
        side = Buffer(emulation.Side(row_step=row_step, k_step=k_step))
        side.pointers[0] = Buffer(data)
        return side, x.double(), "bfloat16"
    fmt = "e5m2" if e5m2 else "e4m3"
    codes, kind = of.coded(draw, rows, k, fmt, special), SCALES[draw.integers(len(SCALES))]
    data, row_step, k_step = _laid_out(codes, draw)
    block = {"tensor": (0, 0), "row": (1, 0)}.get(kind) or tuple(map(int, kind.split(" x ")))
    high, wide = block[0] or rows, block[1] or k
    whole = block[1] == 0
    e8m0 = not whole and bool(draw.integers(2))
    scale = of.positive(
        draw, of.blocks(rows, high), of.blocks(k, wide), not whole or bool(draw.integers(2)), -40, 30
    )
    kept = (torch.frexp(scale)[1] + 126).to(torch.uint8) if e8m0 else scale
    values = (
        decode(codes.view(FORMATS[fmt].dtype), torch.float64)
        * of.spread(scale, (high, wide), rows, k).double()
    )
    if e8m0 and draw.random() < 0.2:  # a block of zeros, as a cast makes it
        values[:high, :wide] = 0
        codes[:high, :wide] = 0x80
        data, row_step, k_step = _laid_out(codes, draw)
        kept[0, 0] = 0
    scales, *steps = _laid_out(kept, draw, dense=whole)
    if kind == "tensor":
        steps = [0, 0]
    finite = bool(values.isfinite().all()) and bool(draw.integers(2))
    fields = dict(
        zip(("block_rows", "block_k", "scale_row_step", "scale_k_step"), (*block, *steps), strict=True)
    )
    fields |= {"format": 2 if e5m2 else 1, "e8m0": int(e8m0), "finite": int(finite)}
    side = Buffer(emulation.Side(row_step=row_step, k_step=k_step, **fields))
    side.pointers[emulation.Side.at.offset] = Buffer(data)
    if not (kind == "tensor" and draw.random() < 0.1 and not bool((scale != 1).any())):
        side.pointers[emulation.Side.scale.offset] = Buffer(scales)
    known = f"{'e8m0' if e8m0 else ''} {'finite' if finite else ''}"
    return side, values, f"{fmt} {kind} {known} steps {row_step}, {k_step}"


def _fp4_side(draw: Draw, rows: int, k: int) -> tuple[Buffer, torch.Tensor, str]:
    """``_side`` of E2M1 codes, k in whole blocks, whose rows are dense."""
    codes, scales, height, values = fp4.drawn_codes(draw, rows, k // 16)
    side = Buffer(emulation.Side(row_step=k, k_step=1, format=3, finite=1, block_scale_rows=height))
    side.pointers[emulation.Side.at.offset] = Buffer(codes)
    side.pointers[emulation.Side.block_scale.offset] = Buffer(scales)
    return side, values, f"e2m1 {height} x 16"


def _near(
    given: bytearray, expected: torch.Tensor, size: torch.Tensor, k: int, dtype: torch.dtype
) -> str | None:
    """What is wrong with bytes that have to be sums of k float32 products, rounded to dtype. size: of the magnitudes."""
    found = torch.frombuffer(given, dtype=dtype).view(expected.shape).double()
    right = expected.to(dtype).double()
    special = ~expected.isfinite()
    same = (found == right) | (found.isnan() & right.isnan())
    allowed = (k + 4) * 2.0**-24 * size + RESULTS[dtype] * expected.abs() + 1e-38
    good = torch.where(special, same, (found - expected).abs() <= allowed)
    if bool(good.all()):
        return None
    at = tuple((~good).nonzero()[0].tolist())
    wrong = f"{int((~good).sum())} of {good.numel()} are wrong"
    return f"{wrong}, first {at}: {found[at]} for {expected[at]} +- {allowed[at]}"


def _sizes(draw: Draw, most: int) -> tuple[int, int, int]:
    return of.size(draw, most, 1), of.size(draw, most, 1), of.size(draw, most, 1)


def _product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(a b^T + bias, the sum of their magnitudes)"""
    exact, size = a @ b.t(), a.nan_to_num(0, 0, 0).abs() @ b.nan_to_num(0, 0, 0).abs().t()
    return (exact, size) if bias is None else (exact + bias.double(), size + bias.double().abs())


def gemm_call(draw: Draw, most: int, loop: int) -> Call:
    m, n, k = _sizes(draw, most)
    special = draw.random() < 0.15
    in_fp4 = loop != emulation.FLOAT32 and draw.random() < 0.3
    k = of.blocks(k, 16) * 16 if in_fp4 else k
    (a, values_a, told_a), (b, values_b, told_b) = (
        _fp4_side(draw, rows, k)
        if in_fp4 and draw.integers(3)
        else _side(draw, rows, k, bool(draw.integers(2)), special)
        for rows in (m, n)
    )
    bias = torch.randn(n, generator=of.seeded(draw)) if draw.random() < 0.5 else None
    add = draw.random() < 0.25
    dtype = torch.float32 if add or draw.random() < 0.5 else torch.bfloat16
    bias = None if add else bias
    there = torch.randn(m, n, generator=of.seeded(draw)).to(dtype)
    exact, size = _product(values_a, values_b, bias)
    if add:
        exact, size = exact + there.double(), size + there.double().abs()
    out = Buffer(emulation.Out(None, int(dtype == torch.bfloat16), int(add), None))
    out.pointers[emulation.Out.at.offset] = Buffer(there, out=True)
    if bias is not None:
        out.pointers[emulation.Out.bias.offset] = Buffer(bias)

    def check(returned: int, outs: list[bytearray]) -> str | None:
        if of.int32(returned):
            return f"returned {of.int32(returned)}"
        return _near(outs[0], exact, size, k, dtype)

    what = f"{m} x {n} x {k}, loop {loop}, {told_a}; {told_b}; {dtype}, bias {bias is not None}, add {add}"
    return Call("gemm", [a, b, out, m, n, k, loop, int(draw.integers(1, 5))], check, what)


def gemm_each_call(draw: Draw, most: int, loop: int) -> Call:
    """Up to three products in one call; one whose scales C refuses leaves its result as it was."""
    count, size = int(draw.integers(1, 4)), ctypes.sizeof(grouped.ProductStruct)
    structs, expected, words = (grouped.ProductStruct * count)(), [], []
    told = Buffer(structs, out=True)
    for i in range(count):
        m, n, k = _sizes(draw, most)
        (a, values_a, told_a), (b, values_b, told_b) = (
            _side(draw, rows, k, bool(draw.integers(2)), draw.random() < 0.15) for rows in (m, n)
        )
        add, refused = bool(draw.integers(2)), draw.random() < 0.15
        dtype = torch.float32 if add or draw.random() < 0.5 else torch.bfloat16
        there = torch.randn(m, n, generator=of.seeded(draw)).to(dtype)
        exact, sizes = _product(values_a, values_b, None)
        if add:
            exact, sizes = exact + there.double(), sizes + there.double().abs()
        structs[i].a, structs[i].b = (emulation.Side.from_buffer_copy(side.bytes) for side in (a, b))
        if refused:
            structs[i].a.block_rows = structs[i].a.block_k = structs[i].a.e8m0 = 0
        structs[i].out = emulation.Out(None, int(dtype == torch.bfloat16), int(add), None)
        structs[i].m, structs[i].n, structs[i].k = m, n, k
        for side, place in ((a, grouped.ProductStruct.a.offset), (b, grouped.ProductStruct.b.offset)):
            told.pointers |= {i * size + place + offset: to for offset, to in side.pointers.items()}
        if refused:
            far = Buffer(torch.tensor([2.0**-120], dtype=torch.float32))
            told.pointers[i * size + grouped.ProductStruct.a.offset + emulation.Side.scale.offset] = far
        out = Buffer(there, out=True)
        told.pointers[i * size + grouped.ProductStruct.out.offset + emulation.Out.at.offset] = out
        expected.append((refused, there, exact, sizes, k, dtype))
        words.append(f"{m} x {n} x {k}, {told_a}; {told_b}; {dtype}, add {add}, refused {refused}")
    told.bytes = bytes(structs)

    def check(returned: int, outs: list[bytearray]) -> str | None:
        done = [one.done for one in (grouped.ProductStruct * count).from_buffer_copy(outs[0])]
        if of.int32(returned) or done != [int(refused) for refused, *_ in expected]:
            return f"returned {of.int32(returned)}, {done}"
        return of.first(
            *(
                of.differs("what was there", out, there) if refused else _near(out, *right)
                for out, (refused, there, *right) in zip(outs[1:], expected, strict=True)
            )
        )

    return Call(
        "gemm_each",
        [told, count, loop, int(draw.integers(1, 4))],
        check,
        f"loop {loop}, " + " and ".join(words),
    )


def _weight(draw: Draw, n: int, k: int, e5m2: bool, finite: bool):
    """(codes, scale_inv, its block or None, float64 values): what skinny_gemm.c multiplies by."""
    fmt = "e5m2" if e5m2 else "e4m3"
    codes = of.coded(draw, n, k, fmt, not finite)
    block = [None, None, (1, 32), (128, 128), (32, 32), (32, 96)][draw.integers(6 if finite else 2)]
    high, wide = block or (n if draw.random() < 0.5 else 1, k)
    scale = of.positive(draw, of.blocks(n, high), of.blocks(k, wide), block is not None, -20, 20)
    values = (
        decode(codes.view(FORMATS[fmt].dtype), torch.float64) * of.spread(scale, (high, wide), n, k).double()
    )
    return codes, scale, block, values


def _finished(draw: Draw, n: int) -> tuple[torch.Tensor | None, torch.dtype]:
    bias = torch.randn(n, generator=of.seeded(draw)) if draw.random() < 0.5 else None
    return bias, (torch.float32, torch.bfloat16)[draw.integers(2)]


def few_rows_call(draw: Draw, most: int, loop: int) -> Call:
    m, (_, n, k) = int(draw.integers(1, skinny_gemm.MOST + 1)), _sizes(draw, most)
    e5m2, finite = bool(draw.integers(2)), bool(draw.integers(2))
    codes, scale, block, values = _weight(draw, n, k, e5m2, finite)
    bias, dtype = _finished(draw, n)
    a = torch.randn(m, k, generator=of.seeded(draw)).bfloat16()
    scale_a = of.positive(draw, int(draw.choice([1, m])), 1, False, -20, 20)
    scale_b = torch.ones(1) if block else scale
    exact, size = _product(a.double() * scale_a.double(), values, bias)
    high, wide = block or (1, 32)
    product = Buffer(
        skinny_gemm.Product(
            *[None] * 7,
            *(
                m,
                n,
                k,
                high,
                wide,
                scale_a.numel() > 1,
                scale_b.numel() > 1,
                e5m2,
                finite,
                dtype == torch.bfloat16,
            ),
        )
    )
    out = torch.empty(m, n, dtype=dtype)
    out.view(torch.uint8).fill_(POISON)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8) if block else None
    parts = {"a": a, "b": codes, "exponents": exponents, "scale_a": scale_a, "scale_b": scale_b, "bias": bias}
    for name, part in parts.items():
        if part is not None:
            product.pointers[getattr(skinny_gemm.Product, name).offset] = Buffer(part)
    product.pointers[skinny_gemm.Product.to.offset] = Buffer(out, out=True)

    def check(returned: int, outs: list[bytearray]) -> str | None:
        return (
            f"returned {of.int32(returned)}" if of.int32(returned) else _near(outs[0], exact, size, k, dtype)
        )

    what = f"{m} x {n} x {k}, loop {loop}, block {block}, e5m2 {e5m2}, finite {finite}, {dtype}"
    return Call("few_rows", [product, loop, int(draw.integers(1, 4))], check, what)


KINDS = (gemm_call, gemm_call, gemm_each_call, few_rows_call)


def loops_call(loops_of: int) -> Call:
    """Which inner loops there are; for AMX a process has to have asked before it multiplies."""
    return Call(
        "has_gemm",
        [],
        lambda returned, _: (
            None if of.int32(returned) & loops_of == loops_of else f"has {of.int32(returned)}"
        ),
        f"{loops_of}",
    )

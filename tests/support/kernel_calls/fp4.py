"""Drawn NVFP4 casts and decodings (fp4.c), and what numerics/nvfp4.py says they give."""

from __future__ import annotations

import ctypes
import math

import torch

from megatron_fp8.backends.base import Region
from megatron_fp8.backends.fp4 import _bytes, _side
from megatron_fp8.kernels.cpu import fp4
from megatron_fp8.numerics import nvfp4
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.numerics.rule import BLOCK_1X16, BLOCK_16X16
from megatron_fp8.numerics.scaling import block_amaxes, compute_amax
from megatron_fp8.recipe import NVFP4BlockScaling
from megatron_fp8.tensor import expand_scale

from . import numbers as of
from .elementwise import empty, named
from .numbers import Draw, differs, first
from .tape import Buffer, Call

RULES = [
    *(NVFP4BlockScaling().rule(role) for role in ("input", "weight", "grad_output")),
    NVFP4BlockScaling(disable_rht=True).rule("grad_output"),
]


def _in_squares(amax: torch.Tensor, rows: int, *, turned: bool) -> torch.Tensor:
    """Amaxes of 1 x 16 blocks [rows, across] as fp4.c keeps them: [squares down, squares across, 16]."""
    amax = torch.nn.functional.pad(amax, (0, 0, 0, -rows % 16)).unflatten(0, (-1, 16))
    return amax.permute((2, 0, 1) if turned else (0, 2, 1)).contiguous()


def cast_call(draw: Draw, most: int) -> Call:
    """One of the two calls of a cast: amaxes, or scales and codes under amaxes that may have grown since."""
    dtype_name, dtype = named(of.DTYPES, draw)
    rule, rows, cols = RULES[draw.integers(len(RULES))], of.size(draw, most, 1), of.size(draw, most, 1)
    square, codes_too = rule.granularity == BLOCK_16X16, bool(draw.integers(2))
    direction = ("rowwise", "columnwise", "both")[draw.integers(3)]
    region = Region(RandomKey(*draw.integers(-(2**31), 2**31, 4).tolist()), int(draw.integers(2**33)), 5, 999)
    x = of.matrix(draw, rows, cols, dtype)
    turned = nvfp4.hadamard(x.t()) if rule.hadamard else x.t().contiguous()
    down, wide = -(-rows // 16), -(-cols // 16)
    (of_x,), count = block_amaxes(x, [(rule.granularity.rows, 16)])
    (of_turned,), _ = block_amaxes(turned, [(1, 16)])
    blocks = [of_x if square else _in_squares(of_x, rows, turned=False)]
    if not square and direction != "rowwise":
        blocks.append(_in_squares(of_turned, cols, turned=True))
    tensor = torch.stack([compute_amax(x), compute_amax(turned if len(blocks) == 2 else x)])
    struct = fp4.CastStruct(None, rows, cols, list(of.DTYPES).index(dtype_name), square, rule.hadamard)
    told = Buffer(struct)
    told.pointers[fp4.CastStruct.x.offset] = Buffer(x)
    size = ctypes.sizeof(ctypes.c_void_p)
    expected: list[torch.Tensor] = []
    if codes_too:
        tensor = tensor * float(draw.choice([1.0, 1.0, 4.0, math.inf]))
        tensor = torch.where(tensor.isnan(), 0.0, tensor)
        sides = [(x, of_x, rows, cols, direction != "columnwise" or square)]
        sides.append((turned, of_turned, cols, rows, direction != "rowwise"))
        for side, (values, amax, high, long, wanted) in enumerate(sides):
            if not wanted:
                continue
            if square and side == 1:
                made = _side(x, of_x, tensor[0], rule, None).transposed()
            else:
                draws = None
                if rule.stochastic:
                    draws = _bytes(region, down * 16 if side else rows, cols, x.device, columnwise=side == 1)
                    draws = draws.t() if side else draws
                made = _side(values, amax, tensor[side], rule, draws)
            parts = made.codes.view(torch.uint8), made.scale_inv.view(torch.uint8)
            assert parts[0].shape == (high, nvfp4.padded_cols(long) // 2)
            for name, part in zip(("codes", "scales"), parts, strict=True):
                expected.append(part.contiguous())
                at = getattr(fp4.CastStruct, name).offset + side * size
                told.pointers[at] = empty(tuple(part.shape), torch.uint8)
        if rule.stochastic:
            draws = fp4.Draws(region.key, region.row_offset * 999 + 5, 999)
            fp4.fill_draws(struct, draws)
            told.bytes = bytes(struct)
    else:
        expected = [*blocks, tensor]
    for side, amax in enumerate(blocks):
        at = fp4.CastStruct.block_amax.offset + side * size
        told.pointers[at] = Buffer(amax) if codes_too else empty(tuple(amax.shape), torch.float32)
    told.pointers[fp4.CastStruct.amax.offset] = Buffer(tensor) if codes_too else empty((2,), torch.float32)
    bad = 0 if count is None else int(count)

    def check(returned: int, outs: list[bytearray]) -> str | None:
        faults = [
            differs(f"part {i}", out, one) for i, (out, one) in enumerate(zip(outs, expected, strict=True))
        ]
        counted = codes_too or returned == bad
        return first(*faults, None if counted else f"{returned} NaN or Inf for {bad}")

    what = (
        f"{rows} x {cols} {dtype_name}, {rule.granularity} {direction}, {rule.hadamard=}, {rule.stochastic=}"
    )
    return Call(
        "fp4_codes" if codes_too else "fp4_amaxes",
        [told, int(draw.integers(1, 4))],
        check,
        f"{what} {down}x{wide}",
    )


def drawn_codes(
    draw: Draw, rows: int, blocks: int, height: int = 0
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """(codes uint8, scales uint8, rows that share one: 1 or 16, what they stand for in float64)"""
    height, generator = height or int(draw.choice([1, 16])), of.seeded(draw)
    codes = torch.randint(256, (rows, blocks * 8), generator=generator, dtype=torch.uint8)
    scales = torch.randint(127, (of.blocks(rows, height), blocks), generator=generator, dtype=torch.uint8)
    granularity = BLOCK_16X16 if height == 16 else BLOCK_1X16
    by = expand_scale(scales.view(torch.float8_e4m3fn).double(), granularity, (rows, blocks * 16))
    return codes, scales, height, nvfp4.values(codes.view(torch.float4_e2m1fn_x2)).double() * by


def decode_call(draw: Draw, most: int) -> Call:
    rows, blocks = of.size(draw, most, 1), of.size(draw, most // 16, 1)
    codes, scales, height, values = drawn_codes(draw, rows, blocks)
    values = values.to(torch.bfloat16)
    out = empty(tuple(values.shape), torch.bfloat16)
    return Call(
        "fp4_decode",
        [Buffer(codes), Buffer(scales), rows, blocks, height, out, int(draw.integers(1, 4))],
        lambda _, outs: differs("values", outs[0], values),
        f"{rows} x {blocks} blocks of {height} rows",
    )


def few_rows_call(draw: Draw, most: int) -> Call:
    """For AVX512-BF16."""
    rows, cols, blocks = int(draw.integers(1, 17)), of.size(draw, most, 1), of.size(draw, most // 16, 1)
    generator, k = of.seeded(draw), blocks * 16
    codes, scales, _, b = drawn_codes(draw, cols, blocks, 16)
    a = torch.randn(rows, k, generator=generator).bfloat16()
    factor, bias = torch.rand(1, generator=generator) + 0.5, torch.randn(cols, generator=generator)
    exact = a.double() @ b.t() * factor.double() + bias.double()
    bound = (a.double().abs() @ b.abs().t() * factor.double() + bias.double().abs()) * 2.0**-16 + 1e-30
    short, out = bool(draw.integers(2)), torch.bfloat16
    to = empty((rows, cols), out if short else torch.float32)
    struct = fp4.ProductStruct(m=rows, n=cols, k=k, to_bfloat16=short)
    told = Buffer(struct)
    for name, tensor in (("a", a), ("b", codes), ("scale", scales), ("factor", factor), ("bias", bias)):
        told.pointers[getattr(fp4.ProductStruct, name).offset] = Buffer(tensor)
    told.pointers[fp4.ProductStruct.to.offset] = to

    def check(returned: int, outs: list[bytearray]) -> str | None:
        found = torch.frombuffer(outs[0], dtype=out if short else torch.float32).view(rows, cols).double()
        near = (found - exact).abs() <= bound + (exact.abs() * 2.0**-8 if short else 0)
        return (
            None
            if of.int32(returned) == 0 and bool(near.all())
            else f"returned {returned}, or far from the sums"
        )

    return Call("few_rows_fp4", [told, int(draw.integers(1, 4))], check, f"{rows} x {cols} x {k}")

"""Drawn calls of what touches every element (emulation.c, blocks.c, stats.c), and what numerics/ says they give."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import torch

from megatron_fp8.kernels.cpu import matrix_quantize, stats
from megatron_fp8.kernels.cpu.emulation import FLOATS
from megatron_fp8.numerics.cast import cast, decode
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import (
    block_amaxes,
    compute_amax,
    compute_e8m0,
    compute_scale,
    compute_scale_inv,
    e8m0_to_scale,
    e8m0_to_scale_inv,
)

from . import numbers as of
from .numbers import Draw, differs, first
from .tape import Buffer, Call

FORMATS = {"e4m3": E4M3, "e5m2": E5M2}
BLOCKS = ((0, 0), (1, 0), (0, 1), (1, 32), (32, 1), (1, 128), (128, 1), (128, 128), (5, 3))
CUTS = (
    (1, 32),
    (32, 1),
    (1, 128),
    (128, 1),
    (128, 128),
    (32, 32),
    (1, 256),
    (1, 1),
    (4, 2),
    (64, 64),
    (128, 256),
)


def _shape(draw: Draw, most: int, smallest: int = 0) -> tuple[int, int]:
    return of.size(draw, most, smallest), of.size(draw, most, smallest)


def _block(draw: Draw, rows: int, cols: int) -> tuple[int, int]:
    high, wide = BLOCKS[draw.integers(len(BLOCKS))]
    return high or max(rows, 1), wide or max(cols, 1)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
    """Where a result goes: bytes that no result has by chance."""
    count = math.prod(shape) * dtype.itemsize
    return Buffer(torch.full((count,), 0xA5, dtype=torch.uint8), out=True)


def named(options: dict, draw: Draw):
    return list(options.items())[draw.integers(len(options))]


def cast_call(draw: Draw, most: int) -> Call:
    (fmt_name, fmt), (dtype_name, dtype) = named(FORMATS, draw), named(of.DTYPES, draw)
    rows, cols = _shape(draw, most)
    high, wide = _block(draw, rows, cols)
    x, scale = of.matrix(draw, rows, cols, dtype), None
    if draw.random() < 0.9:
        scale = of.positive(draw, of.blocks(rows, high), of.blocks(cols, wide), draw.random() < 0.5)
    expected = cast(x, None if scale is None else of.spread(scale, (high, wide), rows, cols), fmt)
    told = None if scale is None else Buffer(scale)
    arguments = [
        Buffer(x),
        empty((rows, cols), torch.uint8),
        rows,
        cols,
        told,
        high,
        wide,
        int(draw.integers(1, 4)),
    ]
    return Call(
        f"cast_{fmt_name}_{dtype_name}",
        arguments,
        lambda _, outs: differs("codes", outs[0], expected.view(torch.uint8)),
        f"{rows} x {cols}, blocks of {high} x {wide}",
    )


def decode_call(draw: Draw, most: int) -> Call:
    fmt_name, fmt = named(FORMATS, draw)
    dtype_name = ("float32", "bfloat16")[draw.integers(2)]
    rows, cols = _shape(draw, most)
    high, wide = _block(draw, rows, cols)
    codes = of.coded(draw, rows, cols, fmt_name, True)
    scale = None
    values = decode(codes.view(fmt.dtype), torch.float32)
    if draw.random() < 0.9:
        scale = of.positive(draw, of.blocks(rows, high), of.blocks(cols, wide), draw.random() < 0.5)
        if draw.random() < 0.3:
            scale[torch.rand(scale.shape, generator=of.seeded(draw)) < 0.1] = torch.nan
        values = values * of.spread(scale, (high, wide), rows, cols)
    values = values.masked_fill(values.isnan(), math.nan).to(of.DTYPES[dtype_name])
    values = values.masked_fill(values.isnan(), math.nan)
    told = None if scale is None else Buffer(scale)
    out = empty((rows, cols), values.dtype)
    return Call(
        f"decode_{fmt_name}_{dtype_name}",
        [Buffer(codes), out, rows, cols, told, high, wide, int(draw.integers(1, 4))],
        lambda _, outs: differs("values", outs[0], values),
        f"{rows} x {cols}, blocks of {high} x {wide}",
    )


def quantize_call(draw: Draw, most: int) -> Call:
    (fmt_name, fmt), (dtype_name, dtype) = named(FORMATS, draw), named(of.DTYPES, draw)
    rows, cols = _shape(draw, most, 1)
    x, scale = of.matrix(draw, rows, cols, dtype), of.positive(draw, 1, 1, draw.random() < 0.5)
    expected = cast(x, scale, fmt).view(torch.uint8)
    bad, there = int((~x.isfinite()).sum()), torch.tensor([draw.choice([0.0, 1.0, math.inf])]).float()
    arguments = [
        *(Buffer(x), empty((rows, cols), torch.uint8), rows * cols, FLOATS[dtype][1], Buffer(scale)),
        *(empty((1,), torch.float32), empty((1,), torch.float32)),
        *(Buffer(there, out=True) if draw.random() < 0.7 else None, int(draw.integers(1, 4))),
    ]
    return Call(
        f"quantize_{fmt_name}_{dtype_name}",
        arguments,
        lambda given, outs: first(
            differs("codes", outs[0], expected),
            differs("inverse", outs[1], compute_scale_inv(scale).view(1)),
            differs("amax", outs[2], compute_amax(x).view(1)),
            differs("running", outs[3], torch.maximum(there, compute_amax(x).view(1))) if outs[3:] else None,
            None if given == bad else f"{given} NaN or Inf for {bad}",
        ),
        f"{rows} x {cols}",
    )


def amax_call(draw: Draw, most: int) -> Call:
    _, dtype = named(of.DTYPES, draw)
    rows, cols = _shape(draw, most, 1)
    x = of.matrix(draw, rows, cols, dtype)
    threads, cuts = (
        int(draw.integers(1, 4)),
        [BLOCKS[i] for i in draw.integers(len(BLOCKS), size=draw.integers(1, 3))],
    )
    integer, inf = FLOATS[dtype]
    told = (matrix_quantize._Cut * len(cuts))(*[(high, wide or cols, None) for high, wide in cuts])
    structs, largest = Buffer(told), []
    for i, (high, wide) in enumerate(cuts):
        down = of.blocks(rows, high) if high else threads
        largest.append(torch.zeros(down, of.blocks(cols, wide or cols), dtype=integer))
        structs.pointers[i * ctypes.sizeof(matrix_quantize._Cut) + matrix_quantize._Cut.largest.offset] = (
            Buffer(largest[i], out=True)
        )
    expected, count = block_amaxes(x, cuts)
    bad = 0 if count is None else int(count)

    def check(given: int, outs: list[bytearray]) -> str | None:
        for (high, _), one, out, right in zip(cuts, largest, outs, expected, strict=True):
            found = torch.frombuffer(out, dtype=integer).view(one.shape)
            found = found if high else found.amax(0, keepdim=True)
            if not torch.equal(found.view(dtype).to(torch.float32), right):
                return f"amaxes of {cuts} differ"
        return None if given == bad else f"{given} NaN or Inf for {bad}"

    unit = math.lcm(*(high for high, _ in cuts if high))
    name = "amax32" if dtype == torch.float32 else "amax16"
    return Call(
        name,
        [Buffer(x), rows, cols, inf, structs, len(cuts), unit, threads],
        check,
        f"{rows} x {cols}, {cuts}",
    )


def e8m0_call(draw: Draw, most: int) -> Call:
    _, fmt = named(FORMATS, draw)
    n = of.size(draw, most)
    amax = of.matrix(draw, 1, n, torch.float32).abs()
    amax = torch.where(amax.isnan(), 0.0, amax)
    return Call(
        "e8m0_of_amax",
        [Buffer(amax), empty((1, n), torch.uint8), n, fmt.max_exponent],
        lambda _, outs: differs("exponents", outs[0], compute_e8m0(amax, fmt)),
        f"{n}",
    )


def power_call(draw: Draw, most: int) -> Call:
    n, inverse = of.size(draw, most), int(draw.integers(2))
    e8m0 = torch.from_numpy(draw.integers(0, 256, n, dtype=np.uint8))
    expected = (e8m0_to_scale if inverse else e8m0_to_scale_inv)(e8m0)
    return Call(
        "power_of_e8m0",
        [Buffer(e8m0), empty((n,), torch.float32), n, inverse],
        lambda _, outs: differs("powers", outs[0], expected),
        f"{n}, inverse {inverse}",
    )


def drawn_rule(draw: Draw, fmt_name: str) -> tuple[str, int, float, matrix_quantize.ScaleRule]:
    """(kind of scale, margin, epsilon, blocks.c's Rule)"""
    fmt, kind = FORMATS[fmt_name], ("fp32", "pow2", "e8m0")[draw.integers(3)]
    margin, epsilon = int(draw.choice([0, 0, 1, 200])), float(draw.choice([0.0, 0.0, 1e-4]))
    largest = fmt.max * 2.0**-margin
    epsilon = ctypes.c_float(epsilon).value
    return (
        kind,
        margin,
        epsilon,
        matrix_quantize.ScaleRule(largest, epsilon, matrix_quantize._KINDS[kind], fmt.max_exponent),
    )


def scales_by(amax: torch.Tensor, fmt_name: str, kind: str, margin: int, epsilon: float):
    """(float32 scale, its inverse as it is kept)"""
    fmt = FORMATS[fmt_name]
    if kind == "e8m0":
        exponents = compute_e8m0(amax, fmt)
        return e8m0_to_scale(exponents), exponents
    scale = compute_scale(amax, fmt, margin=margin, epsilon=epsilon, pow2=kind == "pow2")
    return scale, compute_scale_inv(scale)


def scales_call(draw: Draw, most: int) -> Call:
    fmt_name, _ = named(FORMATS, draw)
    kind, margin, epsilon, rule = drawn_rule(draw, fmt_name)
    while kind == "e8m0":
        kind, margin, epsilon, rule = drawn_rule(draw, fmt_name)
    n = of.size(draw, most)
    amax = of.matrix(draw, 1, n, torch.float32).abs()
    amax = torch.where(amax.isnan(), 0.0, amax)
    scale, inverse = scales_by(amax, fmt_name, kind, margin, epsilon)
    return Call(
        "scales_of_amaxes",
        [Buffer(amax), n, Buffer(rule), empty((n,), torch.float32), empty((n,), torch.float32)],
        lambda _, outs: first(differs("scales", outs[0], scale), differs("inverses", outs[1], inverse)),
        f"{n}, {kind}, margin {margin}",
    )


def blocks_call(draw: Draw, most: int) -> Call:
    """One or two cuts, of scales made there or given."""
    (fmt_name, fmt), (dtype_name, dtype) = named(FORMATS, draw), named(of.DTYPES, draw)
    rows, cols = _shape(draw, most, 1)
    kind, margin, epsilon, rule = drawn_rule(draw, fmt_name)
    given = kind != "e8m0" and draw.random() < 0.4
    choice = [(0, 0), (1, 0), (0, 1), *CUTS] if given else CUTS
    cuts = [choice[i] for i in draw.integers(len(choice), size=draw.integers(1, 3))]
    if draw.random() < 0.5:
        cuts = [(1, 32), (32, 1)] if draw.random() < 0.5 else [(1, 128), (128, 1)]
    x = of.matrix(draw, rows, cols, dtype, finite=None if draw.random() < 0.5 else True)
    bad = int((~x.isfinite()).sum())
    told = (matrix_quantize.CutStruct * len(cuts))(
        *[(high or rows, wide or cols, None, None, None, None) for high, wide in cuts]
    )
    structs, expected = Buffer(told), []
    amaxes, _ = block_amaxes(x, cuts)
    for i, ((high, wide), amax) in enumerate(zip(cuts, amaxes, strict=True)):
        scale, inverse = scales_by(amax, fmt_name, kind, margin, epsilon)
        codes = cast(x, of.spread(scale, (high or rows, wide or cols), rows, cols), fmt).view(torch.uint8)
        expected.append(codes)
        start = i * ctypes.sizeof(matrix_quantize.CutStruct)
        structs.pointers[start + matrix_quantize.CutStruct.codes.offset] = empty((rows, cols), torch.uint8)
        if given:
            structs.pointers[start + matrix_quantize.CutStruct.scale.offset] = Buffer(scale)
        else:
            expected.append(inverse)
            structs.pointers[start + matrix_quantize.CutStruct.scale_inv.offset] = empty(
                tuple(inverse.shape), inverse.dtype
            )
    amax = torch.zeros(1) if given else compute_amax(x).view(1)
    finite = int(not given or (bad == 0 and bool(draw.integers(2))))

    def check(returned: int, outs: list[bytearray]) -> str | None:
        told_amax, rest = outs[0], outs[1:]
        parts = [
            differs(f"part {i}", out, one) for i, (out, one) in enumerate(zip(rest, expected, strict=True))
        ]
        count = 0 if given else bad
        wrong = None if returned == count else f"{returned} NaN or Inf for {count}"
        return first(*parts, differs("amax", told_amax, amax), wrong)

    threads = int(draw.integers(1, 4))
    arguments = [
        *(Buffer(x), rows, cols, FLOATS[dtype][1], structs, len(cuts), Buffer(rule), finite),
        *(empty((1,), torch.float32), threads),
    ]
    what = f"{rows} x {cols}, {cuts}, {kind}, margin {margin}, given {given}, {bad} special, finite {finite}"
    return Call(f"blocks_{fmt_name}_{dtype_name}", arguments, check, what)


def measure_call(draw: Draw, most: int) -> Call:
    """Of values alone and of up to two sides."""
    dtype_name, dtype = named(of.DTYPES, draw)
    rows, cols = _shape(draw, most, 1)
    x = of.matrix(draw, rows, cols, dtype, finite=bool(draw.random() < 0.5))
    sides, buffers = [], []
    for _ in range(draw.integers(0, 3)):
        _, fmt = named(FORMATS, draw)
        high, wide = _block(draw, rows, cols)
        scale = of.positive(draw, of.blocks(rows, high), of.blocks(cols, wide), False, -30, 30)
        codes = cast(x, of.spread(1 / scale, (high, wide), rows, cols), fmt)
        sides.append((fmt, codes, of.spread(scale, (high, wide), rows, cols)))
        buffers.append((high, wide, scale, int(fmt is E5M2)))
    told = [(None, None, h, w, s.numel(), e5m2) for h, w, s, e5m2 in buffers]
    structs = Buffer((stats._Side * len(told))(*told))
    for i, ((_, codes, _), (_, _, scale, _)) in enumerate(zip(sides, buffers, strict=True)):
        structs.pointers[i * ctypes.sizeof(stats._Side)] = Buffer(codes)
        structs.pointers[i * ctypes.sizeof(stats._Side) + stats._Side.scale.offset] = Buffer(scale)
    by_rows = int(any(scale.numel() > 1 for _, _, scale, _ in buffers))
    piece = max(1, stats._PIECE // cols) * cols if by_rows else stats._PIECE
    pieces = -(-rows * cols // piece)
    ok = x.isfinite()
    d = torch.where(ok, x.double(), 0.0)
    some = d[ok & (d != 0)].abs()
    values = [ok.sum().double(), d.sum(), d.abs().sum(), (d**2).sum(), (d**3).sum(), (d**4).sum()]
    most_of = [d[ok].max(), -d[ok].min()] if bool(ok.any()) else [-torch.inf, -torch.inf]
    values += [*most_of, -some.min() if some.numel() else -torch.inf]
    bounds = [0, d.abs().sum(), d.abs().sum(), (d**2).sum(), (d.abs() ** 3).sum(), (d**4).sum(), 0, 0, 0]
    for _, codes, scale in sides:
        meant = decode(codes, torch.float64) * scale
        error = ((torch.where(ok & meant.isfinite(), meant, 0.0) - d) ** 2).sum()
        size = ((meant.nan_to_num(0, 0, 0).abs() + d.abs()) ** 2).sum()
        values += [error, None, None, scale.max().double(), -scale.min().double()]
        bounds += [size, 0, 0, 0, 0]

    def check(_: int, outs: list[bytearray]) -> str | None:
        found = torch.frombuffer(outs[0], dtype=torch.float64)
        for i, (one, right, bound) in enumerate(zip(found.tolist(), values, bounds, strict=True)):
            if right is None:
                continue
            if not (
                one == float(right)
                or abs(one - float(right)) <= 1e-12 * float(bound)
                or float(bound) == math.inf
            ):
                return f"figure {i} is {one} for {float(right)}"
        return None

    arguments = [
        *(Buffer(x), rows, cols, structs, len(told), by_rows, piece),
        *(empty((pieces, 64), torch.uint8), empty((pieces * max(1, len(told)), 24), torch.uint8)),
        *(empty((9 + 5 * len(told),), torch.float64), int(draw.integers(1, 4))),
    ]
    for scratch in arguments[7:9]:
        scratch.out = False
    return Call(f"measure_{dtype_name}", arguments, check, f"{rows} x {cols}, {[b[:2] for b in buffers]}")


def ranges_call(draw: Draw, most: int) -> Call:
    dtype_name, dtype = named(of.DTYPES, draw)
    rows, cols = _shape(draw, most, 1)
    high, wide = CUTS[draw.integers(len(CUTS))]
    x = of.matrix(draw, rows, cols, dtype)
    magnitudes = torch.where(x.isfinite(), x.float().abs(), 0.0)
    amax, _ = block_amaxes(magnitudes, [(high, wide)])
    turned = torch.where(magnitudes > 0, 0x7F800000 - magnitudes.view(torch.int32), 0).view(torch.float32)
    least_of, _ = block_amaxes(turned, [(high, wide)])
    least = (0x7F800000 - least_of[0].view(torch.int32)).view(torch.float32)
    ratio = torch.where(amax[0] > 0, amax[0].double() / least.double(), 1.0).max().view(1)
    out = Buffer(torch.ones(1, dtype=torch.float64), out=True)
    found = Buffer(torch.zeros(of.blocks(rows, high), dtype=torch.float64))
    arguments = [Buffer(x), rows, cols, high, wide, found, out, int(draw.integers(1, 4))]
    return Call(
        f"ranges_{dtype_name}",
        arguments,
        lambda given, outs: first(differs("ratio", outs[0], ratio), "no memory" if of.int32(given) else None),
        f"{rows} x {cols}, {high} x {wide}",
    )


KINDS = (
    *(cast_call, decode_call, quantize_call, amax_call, e8m0_call, power_call, scales_call),
    *(blocks_call, blocks_call, measure_call, ranges_call),
)

"""Drawn casts of one or of many matrices in one call (casts.c), and what numerics/ says they give."""

from __future__ import annotations

import ctypes
import math

import torch

from megatron_fp8.kernels.cpu import matrix_quantize
from megatron_fp8.numerics.cast import cast
from megatron_fp8.numerics.scaling import block_amaxes, compute_amax, compute_scale_inv

from . import numbers as of
from .elementwise import CUTS, FORMATS, drawn_rule, empty, named, scales_by
from .numbers import Draw, differs, first
from .tape import Buffer, Call

SPANNING = ([(0, 0)], [(1, 0)], [(0, 1)], [(1, 0), (0, 1)])


def cast_each_call(draw: Draw, most: int) -> Call:
    """Up to three: in blocks; by amaxes of rows, columns or the matrix, also found before; under given scales."""
    count = int(draw.integers(1, 4))
    told = Buffer((matrix_quantize.CastStruct * count)(), out=True)
    size = ctypes.sizeof(matrix_quantize.CastStruct)
    structs = (matrix_quantize.CastStruct * count)()
    expected, bad, words = [], [], []
    for i in range(count):
        special, what, parts = _cast(draw, most, structs[i], told, i * size)
        bad.append(special)
        words.append(what)
        expected += parts
    told.bytes = bytes(structs)

    def check(returned: int, outs: list[bytearray]) -> str | None:
        after = (matrix_quantize.CastStruct * count).from_buffer_copy(outs[0])
        specials = [one.special for one in after]
        faults = [
            differs(f"part {i}", out, one)
            for i, (out, one) in enumerate(zip(outs[1:], expected, strict=True))
        ]
        wrong = None if specials == bad else f"{specials} NaN or Inf for {bad}"
        return first(*faults, wrong, "no memory" if of.int32(returned) else None)

    return Call("cast_each", [told, count, int(draw.integers(1, 4))], check, "; ".join(words))


def _cast(
    draw: Draw, most: int, to: matrix_quantize.CastStruct, told: Buffer, at: int
) -> tuple[int, str, list[torch.Tensor]]:
    """Tells of one matrix; (how many elements are NaN or Inf, in words, what its buffers have to hold)"""
    (fmt_name, fmt), (dtype_name, dtype) = named(FORMATS, draw), named(of.DTYPES, draw)
    rows, cols = of.size(draw, most, 1), of.size(draw, most, 1)
    kind, margin, epsilon, rule = drawn_rule(draw, fmt_name)
    given = kind == "fp32" and draw.random() < 0.3
    spans = given or (kind != "e8m0" and draw.random() < 0.7)
    cuts = (
        SPANNING[0 if given else draw.integers(len(SPANNING))] if spans else [CUTS[draw.integers(len(CUTS))]]
    )
    x = of.matrix(draw, rows, cols, dtype, finite=None if draw.random() < 0.5 else True)
    bad, amax = int((~x.isfinite()).sum()), compute_amax(x).view(1)
    there = torch.tensor([draw.choice([0.0, 1.0, math.inf])], dtype=torch.float32)
    found = spans and not given and draw.random() < 0.3  # by other ranks too: larger ones, or Inf
    amaxes, _ = block_amaxes(x, cuts)
    if found:
        amaxes = [one * float(draw.choice([1.0, 4.0, math.inf])) for one in amaxes]
        amaxes = [torch.where(one.isnan(), 0.0, one) for one in amaxes]
    to.rows, to.cols, to.rule, to.count = rows, cols, rule, len(cuts)
    to.from_dtype, to.to_e5m2 = list(of.DTYPES).index(dtype_name), fmt_name == "e5m2"
    to.finite = int(found and bad == 0 and bool(draw.integers(2)))
    fields, cut_fields = matrix_quantize.CastStruct, matrix_quantize.CutStruct
    told.pointers[at + fields.x.offset] = Buffer(x)
    told.pointers[at + fields.amax.offset] = empty((1,), torch.float32)
    expected = [torch.zeros(1) if found else amax]
    if draw.random() < 0.7:
        told.pointers[at + fields.running.offset] = Buffer(there, out=True)
        expected.append(there if found else torch.maximum(there, amax))
    for c, ((high, wide), of_blocks) in enumerate(zip(cuts, amaxes, strict=True)):
        to.cuts[c] = matrix_quantize.CutStruct(high, wide, None, None, None, None)
        start = at + fields.cuts.offset + c * ctypes.sizeof(cut_fields)
        scale, inverse = scales_by(of_blocks, fmt_name, kind, margin, epsilon)
        if given:
            scale = of.positive(draw, 1, 1, draw.random() < 0.5)
            inverse = compute_scale_inv(scale)
            told.pointers[at + fields.given.offset] = Buffer(scale)
        if found:
            told.pointers[start + cut_fields.amax.offset] = Buffer(of_blocks.contiguous())
        expected += [
            cast(x, of.spread(scale, (high or rows, wide or cols), rows, cols), fmt).view(torch.uint8),
            inverse,
        ]
        told.pointers[start + cut_fields.codes.offset] = empty((rows, cols), torch.uint8)
        told.pointers[start + cut_fields.scale_inv.offset] = empty(tuple(inverse.shape), inverse.dtype)
    what = f"{rows} x {cols} {dtype_name}, {cuts}, {fmt_name} {kind}, margin {margin}, {given=}, {found=}, {bad} special"
    return 0 if found else bad, what, expected

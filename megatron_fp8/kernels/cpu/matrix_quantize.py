"""Amaxes, scales and codes of CPU matrices in C (casts.c, blocks.c, emulation.c).

One matrix or many a call. What numerics/scaling.py and numerics/cast.py specify, to the bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from ...numerics.formats import E5M2
from ...numerics.rule import Rule
from . import emulation
from .emulation import FLOATS, address, compiled, thread_count

_TALL, _WIDE = 128, 256  # a tile's, in blocks.c
_KINDS = {"fp32": 0, "pow2": 1, "e8m0": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # in casts.c


class CastInput(NamedTuple):
    """A matrix to be cast.

    Attributes:
        x: contiguous [rows, cols]; float32, bfloat16 or float16; not empty. NaN becomes 0x7F, Inf saturates; neither
            makes a scale non-finite.
        rule: format and kind of scale; not stochastic.
        cuts: one or two: rows and columns of a block. Each ``divides``; or each spans all rows, all columns or both (0),
            one row or column high, where scales are not E8M0.
        running: float32 [], where the amax is put if it is larger; None: nowhere.
        scale: float32 [], finite and positive, that was there before x; cuts is then [(0, 0)], scales float32.
        amaxes: of each cut, where it spans: float32, one for each block, as they are to be taken, and not to be found.
        finite: of a matrix with amaxes: whether it has no NaN and no Inf.
    """

    x: torch.Tensor
    rule: Rule
    cuts: Sequence[tuple[int, int]]
    running: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    amaxes: Sequence[torch.Tensor] | None = None
    finite: bool = True


class CodesAndScale(NamedTuple):
    """codes [rows, cols]; scale_inv [row blocks, column blocks], or [] of a matrix, float32 or float8_e8m0fnu: both as
    the matrix lies."""

    codes: torch.Tensor
    scale_inv: torch.Tensor


class CastOutput(NamedTuple):
    """What each cut of a matrix gave; the amax, float32 [] (NaN ignored, Inf kept), and how many elements are NaN or Inf:
    both 0 where amaxes were given."""

    sides: list[CodesAndScale]
    amax: torch.Tensor
    special: int


class CutStruct(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scale_inv", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("amax", ctypes.c_void_p),
    )


class ScaleRule(ctypes.Structure):
    """blocks.c's Rule: how scales are made of amaxes."""

    _fields_ = (
        ("largest", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("max_exponent", ctypes.c_int32),
    )


class CastStruct(ctypes.Structure):
    """casts.c's."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("given", ctypes.c_void_p),
        ("amax", ctypes.c_void_p),
        ("running", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("cuts", CutStruct * 2),
        ("rule", ScaleRule),
        *((name, ctypes.c_int32) for name in ("count", "from_dtype", "to_e5m2", "finite")),
        ("special", ctypes.c_int64),
    )


def divides(cut: tuple[int, int]) -> bool:
    """Whether blocks of so many rows and columns fill the tiles that are quantized at a time."""
    rows, cols = cut
    return rows > 0 and cols > 0 and _TALL % rows == 0 and _WIDE % cols == 0


def quantize(inputs: Sequence[CastInput]) -> list[CastOutput]:
    """Codes and scales of matrices for each way to cut them into blocks; those of one do not depend on the others."""
    if not inputs:
        return []  # and C need not be there
    structs = (CastStruct * len(inputs))()
    made = [_fill_struct(one, to) for one, to in zip(inputs, structs, strict=True)]
    elements = sum(one.x.numel() for one in inputs)
    failed = emulation.compiled().cast_each(
        structs, ctypes.c_int64(len(structs)), emulation.thread_count(elements)
    )
    if failed or any(one.special < 0 for one in structs):
        raise MemoryError("no memory for a tile of a matrix, 700 KB a thread")
    return [CastOutput(*of, one.special) for of, one in zip(made, structs, strict=True)]


def _fill_struct(of: CastInput, to: CastStruct) -> tuple[list[CodesAndScale], torch.Tensor]:
    """Fills in C's struct of a matrix; returns its codes and scales, and its amax float32 [], for C to write."""
    x, rule = of.x, of.rule
    rows, cols = x.shape
    assert rows and cols, "C divides by both"
    kind = torch.uint8 if rule.scale == "e8m0" else torch.float32
    to.x, to.rows, to.cols = emulation.address(x, x.dtype, rows * cols), rows, cols
    largest = torch.empty((), dtype=torch.float32, device="cpu")
    to.amax = largest.data_ptr()
    to.running = None if of.running is None else emulation.address(of.running, torch.float32, 1)
    to.given = None if of.scale is None else emulation.address(of.scale, torch.float32, 1)
    to.rule, to.count, to.finite = scale_rule(rule), len(of.cuts), of.finite
    to.from_dtype, to.to_e5m2 = DTYPES[x.dtype], rule.fmt is E5M2
    made = []
    for i, (high, wide) in enumerate(of.cuts):
        codes = torch.empty(rows, cols, dtype=rule.fmt.dtype, device="cpu")
        blocks = (-(-rows // high) if high else 1, -(-cols // wide) if wide else 1)
        inverse = torch.empty(blocks if high or wide else (), dtype=kind, device="cpu")
        amax = None if of.amaxes is None else emulation.address(of.amaxes[i], torch.float32, inverse.numel())
        to.cuts[i] = CutStruct(high, wide, codes.data_ptr(), inverse.data_ptr(), None, amax)
        made.append(
            CodesAndScale(codes, inverse.view(torch.float8_e8m0fnu) if kind == torch.uint8 else inverse)
        )
    return made, largest


@cache
def scale_rule(rule: Rule) -> ScaleRule:
    """As C takes it. The product is exact: the formats' largest numbers have four bits at most."""
    largest = rule.fmt.max * 2.0**-rule.margin
    return ScaleRule(largest, rule.epsilon, _KINDS[rule.scale], rule.fmt.max_exponent)


class _Cut(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("cols", ctypes.c_int64), ("largest", ctypes.c_void_p))


def block_amaxes(x: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> tuple[list[torch.Tensor], int]:
    """As ``numerics.scaling.block_amaxes`` of a contiguous matrix; (amaxes, how many elements are NaN or Inf)."""
    rows, cols = x.shape
    integer, inf = FLOATS[x.dtype]
    unit = math.lcm(*(r for r, _ in blocks if r))  # no block of rows is shared by two threads
    threads = thread_count(x.numel())
    largest = [
        torch.zeros(
            -(-rows // r) if r else threads, -(-cols // (c or max(cols, 1))), dtype=integer, device="cpu"
        )
        for r, c in blocks
    ]
    cuts = [
        _Cut(r, c or max(cols, 1), address(found, integer, found.numel()))
        for (r, c), found in zip(blocks, largest, strict=True)
    ]
    kernel = compiled().amax32 if integer == torch.int32 else compiled().amax16
    kernel.restype = ctypes.c_int64
    nonfinite = kernel(
        address(x, x.dtype, rows * cols),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        ctypes.c_uint32(inf),
        (_Cut * len(cuts))(*cuts),
        len(cuts),
        ctypes.c_int64(unit),
        threads,
    )
    if nonfinite < 0:
        raise MemoryError(f"no memory for a row of {cols} elements")
    for i, (block_rows, _) in enumerate(blocks):
        if block_rows == 0:
            largest[i] = largest[i].amax(0, keepdim=True)
    return [found.view(x.dtype).to(torch.float32) for found in largest], nonfinite


def e8m0_of_amax(amax: torch.Tensor, max_exponent: int) -> torch.Tensor:
    """As ``numerics.scaling.compute_e8m0``: uint8, amax's shape; max_exponent is the format's."""
    n = amax.numel()
    e8m0 = torch.empty(amax.shape, dtype=torch.uint8, device="cpu")
    compiled().e8m0_of_amax(
        address(amax, torch.float32, n), address(e8m0, torch.uint8, n), ctypes.c_int64(n), max_exponent
    )
    return e8m0


def power_of_e8m0(e8m0: torch.Tensor, inverse: bool) -> torch.Tensor:
    """float32 2^(e8m0 - 127) of uint8 exponents, or 2^(127 - e8m0); NaN of 0xFF."""
    n = e8m0.numel()
    power = torch.empty(e8m0.shape, dtype=torch.float32, device="cpu")
    compiled().power_of_e8m0(
        address(e8m0, torch.uint8, n), address(power, torch.float32, n), ctypes.c_int64(n), int(inverse)
    )
    return power

"""Amaxes, scales and codes of CPU matrices in C (casts.c, blocks.c, emulation.c).

One matrix or many per call. Bits are those of numerics/scaling.py and numerics/cast.py.
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
from .emulation import FLOATS, address, load_kernels, thread_count

_TALL, _WIDE = 128, 256  # a tile's, in blocks.c
_KINDS = {"fp32": 0, "pow2": 1, "e8m0": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # in casts.c


class CastInput(NamedTuple):
    """A matrix to be cast.

    Attributes:
        x: contiguous [rows, cols]; float32, bfloat16 or float16; not empty. NaN becomes 0x7F, Inf saturates; neither
            makes a scale non-finite.
        rule: format and kind of scale; not stochastic.
        cuts: one or two (rows, columns) of a block. Each ``divides``; or, for scales other than E8M0, spans all rows,
            all columns or both (0), with height or width 1.
        running: float32 [], updated by the amax; None: none.
        scale: float32 [], finite and positive, the delayed scale; cuts is then [(0, 0)], scales float32.
        amaxes: for each spanning cut: float32, one per block, given instead of measured.
        own: for given amaxes: x's own amax, float32 [], and its number of NaN and Inf.
    """

    x: torch.Tensor
    rule: Rule
    cuts: Sequence[tuple[int, int]]
    running: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    amaxes: Sequence[torch.Tensor] | None = None
    own: tuple[torch.Tensor, int] | None = None


class CodesAndScale(NamedTuple):
    """codes [rows, cols]; scale_inv [row blocks, column blocks], or [] per matrix, float32 or float8_e8m0fnu; both in the
    matrix's orientation."""

    codes: torch.Tensor
    scale_inv: torch.Tensor


class CastOutput(NamedTuple):
    """The result of each cut; the amax, float32 [] (NaN ignored, Inf kept), and the number of NaN and Inf; for given
    amaxes ``own``, else 0."""

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
    """blocks.c's Rule: how scales are computed from amaxes."""

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
    """Whether blocks of this size divide the tiles that C quantizes at once."""
    rows, cols = cut
    return rows > 0 and cols > 0 and _TALL % rows == 0 and _WIDE % cols == 0


def quantize(inputs: Sequence[CastInput]) -> list[CastOutput]:
    """Codes and scales of matrices for each of their cuts; a matrix's result does not depend on the others."""
    if not inputs:
        return []  # also without C
    structs = (CastStruct * len(inputs))()
    made = [_fill_struct(one, to) for one, to in zip(inputs, structs, strict=True)]
    elements = sum(one.x.numel() for one in inputs)
    failed = emulation.load_kernels().cast_each(
        structs, ctypes.c_int64(len(structs)), emulation.thread_count(elements)
    )
    if failed or any(one.special < 0 for one in structs):
        raise MemoryError("no memory for a tile of a matrix, 700 KB a thread")
    return [
        CastOutput(sides, *(one.own or (amax, struct.special)))
        for (sides, amax), one, struct in zip(made, inputs, structs, strict=True)
    ]


def _fill_struct(of: CastInput, to: CastStruct) -> tuple[list[CodesAndScale], torch.Tensor]:
    """Fills in C's struct of a matrix. Returns its codes, scales and amax float32 [], which C writes."""
    x, rule = of.x, of.rule
    rows, cols = x.shape
    assert rows and cols, "C divides by both"
    kind = torch.uint8 if rule.scale == "e8m0" else torch.float32
    to.x, to.rows, to.cols = emulation.address(x, x.dtype, rows * cols), rows, cols
    largest = torch.empty((), dtype=torch.float32, device="cpu")
    to.amax = largest.data_ptr()
    to.running = None if of.running is None else emulation.address(of.running, torch.float32, 1)
    to.given = None if of.scale is None else emulation.address(of.scale, torch.float32, 1)
    to.rule, to.count, to.finite = scale_rule(rule), len(of.cuts), of.own is None or not of.own[1]
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
    """The rule for C. The product is exact: the formats' largest numbers have at most four bits."""
    largest = rule.fmt.max * 2.0**-rule.margin
    return ScaleRule(largest, rule.epsilon, _KINDS[rule.scale], rule.fmt.max_exponent)


class _Cut(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("cols", ctypes.c_int64), ("largest", ctypes.c_void_p))


def block_amaxes(x: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> tuple[list[torch.Tensor], int]:
    """``numerics.scaling.block_amaxes`` of a contiguous matrix: (amaxes, the number of NaN and Inf)."""
    rows, cols = x.shape
    integer, inf = FLOATS[x.dtype]
    unit = math.lcm(*(r for r, _ in blocks if r))  # threads do not share a block of rows
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
    kernel = load_kernels().amax32 if integer == torch.int32 else load_kernels().amax16
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
    """``numerics.scaling.compute_e8m0``: uint8, amax's shape; max_exponent is the format's."""
    n = amax.numel()
    e8m0 = torch.empty(amax.shape, dtype=torch.uint8, device="cpu")
    load_kernels().e8m0_of_amax(
        address(amax, torch.float32, n), address(e8m0, torch.uint8, n), ctypes.c_int64(n), max_exponent
    )
    return e8m0


def power_of_e8m0(e8m0: torch.Tensor, inverse: bool) -> torch.Tensor:
    """float32 2^(e8m0 - 127) of uint8 exponents, or 2^(127 - e8m0); NaN of 0xFF."""
    n = e8m0.numel()
    power = torch.empty(e8m0.shape, dtype=torch.float32, device="cpu")
    load_kernels().power_of_e8m0(
        address(e8m0, torch.uint8, n), address(power, torch.float32, n), ctypes.c_int64(n), int(inverse)
    )
    return power

"""A matrix to the codes of its blocks, in one or both directions, in one pass over memory (blocks.c); scales of amaxes.

What numerics/scaling.py and numerics/cast.py specify, to the bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...numerics.rule import Rule
from . import loops

_TALL, _WIDE = 128, 256  # a tile's, in blocks.c
_KINDS = {"fp32": 0, "pow2": 1, "e8m0": 2}


class Coded(NamedTuple):
    """codes [rows, cols]; scale_inv [row blocks, column blocks], float32 or float8_e8m0fnu: both as the matrix lies."""

    codes: torch.Tensor
    scale_inv: torch.Tensor


class _Cut(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scale_inv", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    )


class ScaleRule(ctypes.Structure):
    """blocks.c's Rule: how scales are made of amaxes."""

    _fields_ = (
        ("largest", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("max_exponent", ctypes.c_int32),
    )


def divides(cut: tuple[int, int]) -> bool:
    """Whether blocks of so many rows and columns fill the tiles that are quantised at a time."""
    rows, cols = cut
    return rows > 0 and cols > 0 and _TALL % rows == 0 and _WIDE % cols == 0


def quantize(
    x: torch.Tensor, rule: Rule, cuts: Sequence[tuple[int, int]]
) -> tuple[list[Coded], torch.Tensor, int]:
    """Codes and scales of a matrix for each way to cut it into blocks.

    Args:
        x: contiguous [rows, cols]; float32, bfloat16 or float16; not empty. NaN becomes 0x7F, Inf saturates; neither
            makes a scale non-finite.
        rule: format and kind of scale; not stochastic.
        cuts: rows and columns of a block; each ``divides``.

    Returns:
        what each cut gave; the amax (float32 [], NaN ignored, Inf kept); how many elements are NaN or Inf.
    """
    rows, cols = x.shape
    kind = torch.uint8 if rule.scale == "e8m0" else torch.float32
    made, told = [], []
    for high, wide in cuts:
        codes = torch.empty(rows, cols, dtype=rule.fmt.dtype, device="cpu")
        inverse = torch.empty(-(-rows // high), -(-cols // wide), dtype=kind, device="cpu")
        made.append(Coded(codes, inverse.view(torch.float8_e8m0fnu) if kind == torch.uint8 else inverse))
        told.append(_Cut(high, wide, codes.data_ptr(), inverse.data_ptr(), None))
    amax = torch.empty((), dtype=torch.float32, device="cpu")
    return made, amax, _run(x, rule, told, True, amax)


def cast(
    x: torch.Tensor,
    rule: Rule,
    cuts: Sequence[tuple[int, int]],
    scales: Sequence[torch.Tensor],
    finite: bool,
) -> list[torch.Tensor]:
    """Codes [rows, cols] of a matrix for each way to cut it, under scales that are there; one pass over memory for all.

    Args:
        x, rule: as in ``quantize``.
        cuts: rows and columns of a block, 0 meaning the whole extent.
        scales: of each cut, float32, one for each block, row-major; of the rule's kind.
        finite: whether x is known to have no NaN and no Inf, and scales are made of its amaxes or of larger finite ones:
            then nothing saturates.
    """
    rows, cols = x.shape
    made, told = [], []
    for (high, wide), scale in zip(cuts, scales, strict=True):
        codes = torch.empty(rows, cols, dtype=rule.fmt.dtype, device="cpu")
        high, wide = high or rows, wide or cols
        of = loops.address(scale, torch.float32, -(-rows // high) * -(-cols // wide))
        made.append(codes)
        told.append(_Cut(high, wide, codes.data_ptr(), None, of))
    _run(x, rule, told, finite, torch.empty((), dtype=torch.float32, device="cpu"))
    return made


def _run(x: torch.Tensor, rule: Rule, cuts: list[_Cut], finite: bool, amax: torch.Tensor) -> int:
    rows, cols = x.shape
    integer = ctypes.c_uint32 if x.dtype == torch.float32 else ctypes.c_uint16
    function = getattr(loops.compiled(), f"blocks_{loops.NAMES[rule.fmt.dtype]}_{loops.NAMES[x.dtype]}")
    function.restype = ctypes.c_int64
    nonfinite: int = function(
        loops.address(x, x.dtype, rows * cols),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        integer(loops.FLOATS[x.dtype][1]),
        (_Cut * len(cuts))(*cuts),
        len(cuts),
        ctypes.byref(scale_rule(rule)),
        int(finite),
        loops.address(amax, torch.float32, 1),
        loops.thread_count(x.numel()),
    )
    if nonfinite < 0:
        raise MemoryError("no memory for a tile of a matrix, 700 KB a thread")
    return nonfinite


def scales(amax: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, scale_inv), float32 of amax's shape, as ``numerics.scaling`` makes them; not for E8M0."""
    n = amax.numel()
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    loops.compiled().scales_of_amaxes(
        loops.address(amax, torch.float32, n),
        ctypes.c_int64(n),
        ctypes.byref(scale_rule(rule)),
        loops.address(scale, torch.float32, n),
        loops.address(inverse, torch.float32, n),
    )
    return scale, inverse


def scale_rule(rule: Rule) -> ScaleRule:
    """As C takes it. The product is exact: the formats' largest numbers have four bits at most."""
    largest = rule.fmt.max * 2.0**-rule.margin
    return ScaleRule(largest, rule.epsilon, _KINDS[rule.scale], rule.fmt.max_exponent)

"""Sums and extremes of matrices and their codes in C (stats.c), for telemetry.

megatron_fp8/telemetry has the same in torch, for machines without a compiler; it takes thirty times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .emulation import NAMES, address, is_plain, load_kernels, reason, thread_count

_PIECE = 16384
_VALUES_BYTES, _CODES_BYTES = 64, 24  # sizeof(Values), sizeof(Codes)
_OF_VALUES, _OF_CODES = 9, 5


class Side(NamedTuple):
    """Codes of a matrix, in its orientation.

    Attributes:
        made: float8 [rows, cols], contiguous.
        scale: float32, contiguous, one per block, row-major.
        block: (rows, cols) that share a scale; 0: the whole extent.
        largest: the largest number of their format: 448, 57344; or 6 of E2M1 numbers, which are given as E4M3.
    """

    made: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    largest: float


class _Side(ctypes.Structure):
    _fields_ = (
        ("made", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("height", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("e5m2", ctypes.c_int32),
        ("largest", ctypes.c_double),
    )


def usable(x: torch.Tensor) -> bool:
    """Whether these functions take x: a plain, contiguous CPU tensor that is not empty, on a machine that could compile
    them. They take small ones too, because torch's time grows mostly with the number of calls."""
    return is_plain(x) and x.numel() > 0 and x.dtype in NAMES and reason() is None


def measure(x: torch.Tensor, sides: Sequence[Side] = ()) -> tuple[list[float], list[list[float]]]:
    """Statistics of x [rows, cols] (float32, bfloat16 or float16) and of its codes, without NaN and Inf.

    Returns:
        Nine numbers of x: the number of finite elements; their sums of x, |x|, x^2, x^3 and x^4; the maxima of x, of -x,
        and of -|x| over nonzero x (-Inf if there are none). And five of each side: the sum of squared errors, the number
        of values that became zero, the number beyond the largest code, the largest scale, the negative of the smallest.
    """
    rows, cols = x.shape
    total = rows * cols
    told = [_describe_side(side, rows, cols) for side in sides]
    by_rows = any(one.scales > 1 for one in told)
    piece = max(1, _PIECE // cols) * cols if by_rows else _PIECE
    pieces = -(-total // piece)
    # partial results of each piece: of the values, then of each side
    kept = torch.empty(pieces * (_VALUES_BYTES + len(told) * _CODES_BYTES), dtype=torch.uint8, device="cpu")
    out = (ctypes.c_double * (_OF_VALUES + _OF_CODES * len(told)))()
    getattr(load_kernels(), f"measure_{NAMES[x.dtype]}")(
        address(x, x.dtype, total),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        (_Side * len(told))(*told),
        ctypes.c_int64(len(told)),
        int(by_rows),
        ctypes.c_int64(piece),
        ctypes.c_void_p(kept.data_ptr()),
        ctypes.c_void_p(kept.data_ptr() + pieces * _VALUES_BYTES),
        out,
        thread_count(total),
    )
    numbers = list(out)
    return numbers[:_OF_VALUES], [
        numbers[at : at + _OF_CODES] for at in range(_OF_VALUES, len(numbers), _OF_CODES)
    ]


def _describe_side(side: Side, rows: int, cols: int) -> _Side:
    height, width = side.block[0] or rows, side.block[1] or cols
    scales = -(-rows // height) * -(-cols // width)
    return _Side(
        address(side.made, side.made.dtype, rows * cols).value,
        address(side.scale, torch.float32, scales).value,
        height,
        width,
        scales,
        {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}[side.made.dtype],
        side.largest,
    )


def largest_ratio(x: torch.Tensor, block: tuple[int, int]) -> float:
    """The largest ratio, over blocks, of the greatest to the least nonzero magnitude; 1 for all zeros.

    Args:
        x: [rows, cols]; elements that are NaN or Inf count as zeros.
        block: rows and columns of a block, each 1 or more; blocks at the edges may be partial.
    """
    rows, cols = x.shape
    found = torch.empty(-(-rows // block[0]), dtype=torch.float64, device="cpu")
    out = (ctypes.c_double * 1)(1.0)
    failed = getattr(load_kernels(), f"ranges_{NAMES[x.dtype]}")(
        address(x, x.dtype, rows * cols),
        *(ctypes.c_int64(size) for size in (rows, cols, *block)),
        address(found, torch.float64, found.numel()),
        out,
        thread_count(x.numel()),
    )
    if failed:
        raise MemoryError(f"no memory for a row of {cols} elements")
    return out[0]

"""Sums and extremes of matrices and of their codes, in C (figures.c), in one pass: what telemetry measures on CPUs.

For machines without a compiler megatron_fp8/telemetry has the same in torch, which takes thirty times as long.
"""

from __future__ import annotations

import ctypes

import torch

from .loops import NAMES, address, compiled, plain, reason, thread_count

_PIECE = 16384
_VALUES_BYTES = 64  # sizeof(Values)


def usable(x: torch.Tensor) -> bool:
    """Whether x is for these functions: a plain, contiguous CPU tensor that is not empty, on a machine that could compile
    them. Small ones too: torch's time is mostly the number of its calls."""
    return plain(x) and x.numel() > 0 and x.dtype in NAMES and reason() is None


def values(x: torch.Tensor) -> list[float]:
    """Of x (float32, bfloat16 or float16, any shape): how many elements are finite; of those the sums of x, |x|, x^2, x^3
    and x^4; the maxima of x, of -x, and of -|x| where x is not zero (-Inf: of nothing)."""
    n = x.numel()
    pieces = -(-n // _PIECE)
    found = torch.empty(pieces * _VALUES_BYTES, dtype=torch.uint8, device="cpu")
    out = (ctypes.c_double * 9)()
    getattr(compiled(), f"values_{NAMES[x.dtype]}")(
        address(x, x.dtype, n),
        ctypes.c_int64(n),
        address(found, torch.uint8, found.numel()),
        out,
        thread_count(n),
    )
    return list(out)


def largest_ratio(x: torch.Tensor, block: tuple[int, int]) -> float:
    """The largest ratio of a block's greatest magnitude to its least that is not zero; 1 where all is zeros.

    Args:
        x: [rows, cols]; elements that are NaN or Inf count as zeros.
        block: rows and columns of a block, each 1 or more; blocks at the edges may be partial.
    """
    rows, cols = x.shape
    found = torch.empty(-(-rows // block[0]), dtype=torch.float64, device="cpu")
    out = (ctypes.c_double * 1)(1.0)
    failed = getattr(compiled(), f"ranges_{NAMES[x.dtype]}")(
        address(x, x.dtype, rows * cols),
        *(ctypes.c_int64(size) for size in (rows, cols, *block)),
        address(found, torch.float64, found.numel()),
        out,
        thread_count(x.numel()),
    )
    if failed:
        raise MemoryError(f"no memory for a row of {cols} elements")
    return out[0]


def codes(
    x: torch.Tensor, made: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int]
) -> list[float]:
    """The sum of squared errors of codes, how many values vanished, and how many lie beyond the largest code.

    Args:
        x: [rows, cols]; elements that are NaN or Inf are left out.
        made: float8 [rows, cols], contiguous.
        scale_inv: float32, one for each block, row-major.
        block: (rows, cols) that share a scale, 0 meaning the whole extent.
    """
    rows, cols = x.shape
    height, width = block[0] or rows, block[1] or cols
    scale_inv = scale_inv.contiguous()
    whole = height >= rows and width >= cols
    found = torch.empty(-(-x.numel() // _PIECE) if whole else rows, 3, dtype=torch.float64, device="cpu")
    out = (ctypes.c_double * 3)()
    getattr(compiled(), f"codes_{NAMES[made.dtype]}_{NAMES[x.dtype]}")(
        address(x, x.dtype, rows * cols),
        address(made, made.dtype, rows * cols),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        address(scale_inv, torch.float32, -(-rows // height) * -(-cols // width)),
        ctypes.c_int64(height),
        ctypes.c_int64(width),
        address(found, torch.float64, found.numel()),
        out,
        thread_count(x.numel()),
    )
    return list(out)

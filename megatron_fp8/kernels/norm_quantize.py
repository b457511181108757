"""RMSNorm fused with quantisation: the norm's result is never written in BF16.

Two launches: the statistic of every row, then any of quantize.py's passes over the ``Normalized`` source made of it. The
input is read twice and codes are written once; norm and quantisation apart read it once, write the result and read that
again. One launch would have a program hold 128 whole rows, which no on-chip memory does at hidden 4096.

What is promised. Given rstd, the norm's result is that of mcore/layers/norm.py in all bits, and so are the codes: two
float32 products and one rounding. rstd itself is a sum of ``hidden`` squares, whose order differs between devices and
from torch's (which, besides, squares a rounded root): it agrees to a few units in the last place, not in bits. So
mcore/layers/norm.py takes it from here wherever kernels run, fused or not, and hands the same one to backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device
from .device_math import divide, square_root, widen
from .tile_loaders import TileSource, unit_stride


class Normalized(TileSource):
    """RMSNorm, given its statistic: x * rstd * (weight + offset), two float32 products and one rounding to x's dtype.

    Args:
        x: [rows, hidden], float32, bfloat16 or float16. A row with a NaN is NaN throughout; one with an Inf is NaN there
            and 0 elsewhere.
        rstd: float32 [rows], contiguous (``row_rstd``).
        weight: [hidden], any of these dtypes.
    """

    kind = "norm"
    by_row = ("x", "first")

    def __init__(self, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, offset: float = 0.0):
        super().__init__(x.shape[0], x.shape[1], unit_stride(x), rstd, unit_stride(weight), offset)


@on_its_device
def row_rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 [rows]: 1 / sqrt(mean(x^2) + eps) of x [rows, hidden], whose rows may be strided."""
    x = unit_stride(x)
    rows, cols = x.shape
    rstd = torch.empty(rows, device=x.device, dtype=torch.float32)
    if rows:
        # A float, since Triton turns an int argument of 1 into a constant, which cannot be converted.
        _row_rstd[(triton.cdiv(rows, 8),)](
            x, x.stride(0), rstd, rows, cols, float(cols), eps,
            ROWS=8, COLS=512, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return rstd


@triton.jit
def _row_rstd(x, stride, rstd, rows, cols, count, eps, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        value = widen(tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0))
        squares += value * value
    mean = divide(tl.sum(squares, 1), count)
    tl.store(rstd + row, divide(1.0, square_root(mean + eps)), mask=row < rows)

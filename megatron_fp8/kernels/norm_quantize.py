"""RMSNorm fused with quantisation: the norm's result is never written in BF16.

Two launches: the first computes every row's statistic, the second is any quantize.py pass over the ``Normalized``
source. The fused pair reads the input twice and writes codes once; separate kernels read the input, write the result and
read it again. A single launch would need 128 whole rows on chip, which does not fit at hidden 4096.

Guarantee: given rstd, the norm's result and the codes have the bits of mcore/layers/norm.py (two float32 products and
one rounding). rstd is a sum of ``hidden`` squares; its order differs between devices and from torch (which also squares a
rounded root), so rstd agrees to a few units in the last place only. Wherever kernels run, fused or not,
mcore/layers/norm.py therefore takes rstd from here and passes the same rstd to backward.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device
from .device_math import divide, square_root, widen
from .tile_loaders import TileSource, unit_stride


class Normalized(TileSource):
    """RMSNorm of a known rstd: x * rstd * (weight + offset), two float32 products, one rounding to x's dtype.

    Args:
        x: [rows, hidden], float32, bfloat16 or float16. A NaN makes its whole row NaN; an Inf gives NaN at its position
            and 0 in the rest of the row.
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
        # A float: Triton turns an int argument of 1 into a constant, which cannot be converted.
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

"""RMSNorm and SwiGLU fused with quantization: their results are never written in BF16.

RMSNorm takes two launches: the first computes every row's statistic, the second is any quantize.py pass over the
``RmsNorm`` source. The fused pair reads the input twice and writes codes once; separate kernels read the input, write
the result and read it again. A single launch would need 128 whole rows on chip, which does not fit at hidden 4096.

Guarantee: given rstd, the norm's result and the codes have the bits of mcore/layers/norm.py (two float32 products and
one rounding). rstd is a sum of ``hidden`` squares; its order differs between devices and from torch (which also squares a
rounded root), so rstd agrees to a few units in the last place only. Wherever kernels run, fused or not,
mcore/layers/norm.py therefore takes rstd from here and passes the same rstd to backward.

SwiGLU, forward and backward: silu(gate) * up, with [gate, up] the halves of the input's last dimension, in float32,
optionally times a weight per token (a router's probability), rounded once to the input's dtype and then quantized: what
mcore/layers/activation.py and the cast do.

Guarantee: codes and scales are those of the rounded result, bit for bit. The result depends on exp, whose last bits
differ between devices: it is within one unit in the last place of its dtype of torch's.

The gradient of [gate, up] is one matrix, [tokens, 2 n]. A tile computes its own half, and reads the inputs again that the
other half's tile has read (from L2). Amaxes without blocks are computed for both halves at once, with one sigmoid.
Rejected for the casts: a program for both halves. Its blocks would end at n, not at a multiple of 128, and its 128 x 128
tiles would need more registers than two programs have.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import on_its_device
from .device_math import divide, square_root, widen
from .tiles import TileSource, sigmoid, unit_stride


class RmsNorm(TileSource):
    """RMSNorm with a given rstd: x * rstd * (weight + offset), two float32 products, one rounding to x's dtype.

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
        # A float: an int argument of 1 becomes a constant in Triton, which cannot be converted.
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


class Swiglu(TileSource):
    """silu(gate) * up (* weights), [tokens, n], rounded to the input's dtype.

    Args:
        x: [tokens, 2 n] = [gate, up]; float32, bfloat16 or float16.
        weights: [tokens] or [tokens, 1], any of these dtypes; None: 1.

    Raises:
        ValueError: the last dimension is odd.
    """

    kind = "swiglu"
    by_row = ("x", "second")

    def __init__(self, x: torch.Tensor, weights: torch.Tensor | None = None):
        if x.shape[-1] % 2:
            raise ValueError(f"SwiGLU needs [gate, up], an even last dimension; got {tuple(x.shape)}")
        super().__init__(x.shape[0], x.shape[1] // 2, unit_stride(x), None, _per_token(weights))


class SwigluGradient(TileSource):
    """The gradient of SwiGLU's input, [tokens, 2 n] = [dgate, dup], in dy's dtype.

    Args:
        dy: [tokens, n].
        x, weights: as in the forward.
    """

    kind = "swiglu_grad"
    by_row = ("x", "first", "second")

    def __init__(self, dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None = None):
        assert x.shape == (dy.shape[0], 2 * dy.shape[1]), "dy [tokens, n] and x [tokens, 2 n]"
        super().__init__(x.shape[0], x.shape[1], unit_stride(dy), unit_stride(x), _per_token(weights))

    def halves(self) -> dict[str, Any]:
        """Leading arguments of a kernel that computes both halves at once (``tiles.load_halves``)."""
        names = ("x", "x_stride", "first", "first_stride", "second", "rows", "WEIGHTED")
        return {name: self.arguments()[name] for name in names} | {"half": self.cols // 2}


def _per_token(weights: torch.Tensor | None) -> torch.Tensor | None:
    return None if weights is None else weights.detach().reshape(-1).contiguous()


@on_its_device
def swiglu_weight_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """float32 [tokens]: the gradient of the weight per token, the sum of dy * silu(gate) * up over n."""
    dy, x = unit_stride(dy), unit_stride(x)
    rows, cols = dy.shape
    grad = torch.empty(rows, device=dy.device, dtype=torch.float32)
    if rows:
        _weight_grad[(triton.cdiv(rows, 8),)](
            dy,
            dy.stride(0),
            x,
            x.stride(0),
            grad,
            rows,
            cols,
            ROWS=8,
            COLS=256,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return grad


@triton.jit
def _weight_grad(dy, dy_stride, x, x_stride, grad, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        at = x + row[:, None] * x_stride + col[None, :]
        gate = widen(tl.load(at, mask=inside, other=0.0))
        up = widen(tl.load(at + cols, mask=inside, other=0.0))
        d = widen(tl.load(dy + row[:, None] * dy_stride + col[None, :], mask=inside, other=0.0))
        total += d * (gate * sigmoid(gate)) * up
    tl.store(grad + row, tl.sum(total, 1), mask=row < rows)

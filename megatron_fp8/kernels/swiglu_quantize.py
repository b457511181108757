"""SwiGLU, forward and backward, whose result is quantised as it is made.

silu(gate) * up, with [gate, up] the halves of the input's last dimension, in float32, optionally times a weight per token
(a router's probability), rounded once to the input's dtype and then quantised: what mcore/layers/activation.py and the
cast do.

What is promised. Codes and scales are those of the rounded result, in all bits. The result itself goes through exp, whose
last bits differ between devices: it is within one unit in the last place of its dtype of torch's.

The gradient of [gate, up] is one matrix, [tokens, 2 n]. A tile of it computes the half that it lies in, and reads again
what the other half's tile has read (from L2). Amaxes, which have no blocks, are found of both halves at once, with one
sigmoid. Rejected for the casts: a program that makes both halves, whose blocks then end where n does, not where 128 does,
and which holds twice the numbers, in 128 x 128 tiles more than two programs have registers for.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from . import on_its_device
from .device_math import widen
from .tile_loaders import TileSource, sigmoid, unit_stride


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
        """What a kernel takes first that computes both halves at once (``tile_loaders.load_halves``)."""
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

"""Linears by the specification alone, benchmarks/support/reference.py: slow numpy, and no line shared with the package.

What a test makes of these numbers is what FP8 does to it, whoever computes it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from benchmarks.support import reference
from benchmarks.support.reference import E4M3, E5M2, Rule

TENSOR, ROW, ONE_BY_128, SQUARE, ONE_BY_32 = (None, None), (1, None), (1, 128), (128, 128), (1, 32)
RULES = {
    "tensorwise": (Rule(E4M3, TENSOR), Rule(E4M3, TENSOR), Rule(E5M2, TENSOR)),
    "delayed": (Rule(E4M3, TENSOR), Rule(E4M3, TENSOR), Rule(E5M2, TENSOR)),
    "rowwise": (Rule(E4M3, ROW, pow2=True),) * 3,
    "blockwise": tuple(Rule(E4M3, block, pow2=True) for block in (ONE_BY_128, SQUARE, ONE_BY_128)),
    "mxfp8": (Rule(E4M3, ONE_BY_32, mx=True),) * 3,
}
"""Recipe -> how input, weight and gradient are rounded. Delayed scaling as in its first iteration, without a history."""
LEAST = 16
"""Linears of fewer features stay as they are."""


def _rounded(x: torch.Tensor, rule: Rule, turned: bool = False) -> np.ndarray:
    """float64: x [rows, cols] after quantize and dequantize, or x^T [cols, rows] along its rows."""
    values = x.detach().float().numpy()
    return reference.dequantize(*(reference.columnwise if turned else reference.quantize)(values, rule), rule)


def _tensor(product: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(product.astype(np.float32)).to(dtype)


class SpecifiedLinear(torch.autograd.Function):
    """x [M, K], weight [N, K], bias [N] or None -> [M, N] in x's dtype, and the gradients; products in float64."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: str
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.bias_dtype = recipe, None if bias is None else bias.dtype
        of_x, of_weight, _ = RULES[recipe]
        product = _rounded(x, of_x) @ _rounded(weight, of_weight).T
        shift = 0.0 if bias is None else bias.detach().float().numpy()
        return _tensor(product.astype(np.float32) + shift, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_dy = RULES[ctx.recipe]
        dx = _rounded(dy, of_dy) @ _rounded(weight, of_weight, turned=True).T
        dw = _rounded(dy, of_dy, turned=True) @ _rounded(x, of_x, turned=True).T
        db = None if ctx.bias_dtype is None else dy.float().sum(0).to(ctx.bias_dtype)
        return _tensor(dx, x.dtype), _tensor(dw, weight.dtype), db, None


def is_specified(module: torch.nn.Module) -> bool:
    """Whether it is a linear (converted or not) that FP8 is meant for: of 16 and more features."""
    return isinstance(module, torch.nn.Linear | Conv1D) and min(module.weight.shape) >= LEAST


def specify(recipe: str) -> contextlib.ExitStack:
    """From now on every unconverted linear of 16 and more features computes as specified, until the result is closed."""
    undo = contextlib.ExitStack()
    for kind, lies_as in ((torch.nn.Linear, lambda w: w), (Conv1D, torch.Tensor.t)):
        undo.callback(setattr, kind, "forward", kind.forward)
        kind.forward = _forward(kind.forward, lies_as, recipe)  # type: ignore[method-assign]
    return undo


def _forward(plain: Any, lies_as: Any, recipe: str) -> Any:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not is_specified(self):
            return plain(self, x)
        matrix = lies_as(self.weight)
        y = SpecifiedLinear.apply(x.reshape(-1, matrix.shape[1]), matrix, self.bias, recipe)
        return y.reshape(*x.shape[:-1], matrix.shape[0])

    return forward

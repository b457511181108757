"""SwiGLU that keeps its input for backward in scaled FP8 (``activation_func_fp8_input_store``).

Megatron-Core's version stores ``input.to(float8_e4m3fn)`` without a scale: values under 2^-10 vanish. Here blocks of
1x128 carry a power-of-two scale each: one byte a value and 3 % for scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..backends import emulated
from ..formats import E4M3
from ..recipe import BLOCK_1X128, Rule
from ..tensor import QuantizedSide

_STORE = Rule(E4M3, BLOCK_1X128, "pow2")


class _SwiGLU(torch.autograd.Function):
    """y = silu(gate) * up * weights, with [gate, up] the halves of x's last dimension; float32 inside.

    x [tokens, 2 n], weights [tokens, 1] (a router's probabilities) or None; y [tokens, n] in x's dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        side = emulated.quantize(x, _STORE, "rowwise").tensor.rowwise
        assert side is not None
        ctx.save_for_backward(side.codes, side.scale_inv, weights)
        gate, up = x.chunk(2, -1)
        y = torch.nn.functional.silu(gate.to(torch.float32)) * up
        return (y if weights is None else y * weights).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes, scale_inv, weights = ctx.saved_tensors
        gate, up = QuantizedSide(codes, scale_inv, BLOCK_1X128, True).dequantize().chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dy, dweights = grad_output.to(torch.float32), None
        if weights is not None:
            dweights = (dy * silu * up).sum(-1, keepdim=True).to(weights.dtype)
            dy = dy * weights
        dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([dgate, dy * silu], -1).to(grad_output.dtype), dweights


def _stored(x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None) -> torch.Tensor:
    x = x if bias is None else x + bias
    y = _SwiGLU.apply(x.reshape(-1, x.shape[-1]), weights)
    return y.view(*x.shape[:-1], x.shape[-1] // 2)


def store_swiglu_input_in_fp8(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's bias_swiglu_impl, with the scaled store where fp8_input_store is asked for."""

    def bias_swiglu_impl(
        input: torch.Tensor,
        bias: torch.Tensor | None,
        fp8_input_store: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not fp8_input_store:
            return original(input, bias, fp8_input_store, *args, **kwargs)
        return _stored(input, bias, None)

    return bias_swiglu_impl


def store_expert_swiglu_input_in_fp8(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's weighted_bias_swiglu_impl (experts: weights are the router's [tokens, 1]), with the scaled store."""

    def weighted_bias_swiglu_impl(
        input: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, fp8_input_store: bool = False
    ) -> torch.Tensor:
        if not fp8_input_store:
            return original(input, bias, weights, fp8_input_store)
        return _stored(input, bias, weights)

    return weighted_bias_swiglu_impl

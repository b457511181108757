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
    """y = silu(gate) * up, with [gate, up] the halves of x's last dimension; float32 inside, x's dtype outside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        side = emulated.quantize(x, _STORE, "rowwise").tensor.rowwise
        assert side is not None
        ctx.save_for_backward(side.codes, side.scale_inv)
        gate, up = x.chunk(2, -1)
        return (torch.nn.functional.silu(gate.to(torch.float32)) * up).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
        codes, scale_inv = ctx.saved_tensors
        gate, up = QuantizedSide(codes, scale_inv, BLOCK_1X128, True).dequantize().chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        dy = grad_output.to(torch.float32)
        dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([dgate, dy * gate * sigmoid], -1).to(grad_output.dtype)


def store_swiglu_input_in_fp8(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Megatron's bias_swiglu_impl, with the scaled store where fp8_input_store is asked for."""

    def bias_swiglu_impl(
        input: torch.Tensor, bias: torch.Tensor | None, fp8_input_store: bool = False, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if not fp8_input_store:
            return original(input, bias, fp8_input_store, *args, **kwargs)
        x = input if bias is None else input + bias
        return _SwiGLU.apply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], x.shape[-1] // 2)

    return bias_swiglu_impl

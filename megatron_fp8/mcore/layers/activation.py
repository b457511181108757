"""SwiGLU and norms beside FP8 linears: fused into quantization, or input saved in FP8.

**Fused.** In Megatron-Core's layer

    input_layernorm -> self_attention.linear_qkv
    pre_mlp_layernorm -> mlp.linear_fc1 -> SwiGLU -> mlp.linear_fc2

each arrow is a tensor with one reader. If the reader makes codes of it by kernels (native backend, input in FP8 in fprop
and wgrad), a LazyTensor takes its place (kernels/lazy_tensor.py); in backward, another one from SwiGLU to linear_fc1. The
kernels compute it in float32 with one rounding. Which linear reads which norm is set when a layer is built. Whether that
linear makes codes is checked at every call, since warm-up, overrides and disabled regions change it. Experts that are
called as one (grouped_mlp.py) are one such MLP.

Still written to memory: the result of a norm that Megatron recomputes separately, since it frees the storage of that
result and a LazyTensor has none (recognised by the reader's save_original_input, which Megatron sets); of a norm
before experts, since the router reads it too; and of LayerNorm, which has no kernel.

Rejected: fused modules in the layer spec. The model would have other parameter names, and a layer in BF16, or in its
warm-up, other modules than one in FP8.

**Saved in FP8** (``activation_func_fp8_input_store``). Megatron-Core's version stores ``input.to(float8_e4m3fn)`` without
a scale: values under 2^-10 become zero. Here each 1x128 block has a power-of-two scale: one byte a value and 3 % for
scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ...backends import reference
from ...backends.base import CastRequest
from ...backends.native import backend as native
from ...kernels.lazy_tensor import LazyTensor, materialize
from ...linear.saved_operands import first_derivative_only, restore, save
from ...numerics.formats import E4M3
from ...numerics.rule import BLOCK_1X128, Rule
from ...tensor import QuantizedSide
from ..patches.patching import PatchList
from .norm import Norm

patches = PatchList()
_WHY_STORE = "activation_func_fp8_input_store stores codes without a scale"
_WHY_FUSED = "norms and SwiGLU before an FP8 linear are computed by its kernel"
_STORE = Rule(E4M3, BLOCK_1X128, "pow2")


class _SwiGLU(torch.autograd.Function):
    """y = silu(gate) * up * weights, with [gate, up] the halves of x's last dimension; computed in float32.

    x [tokens, 2 n], weights [tokens, 1] (a router's probabilities) or None; y [tokens, n] in x's dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        side = reference.quantize(CastRequest(x, _STORE, "rowwise")).tensor.rowwise
        assert side is not None
        save(ctx, [side.codes, side.scale_inv, weights])
        gate, up = x.chunk(2, -1)  # [tokens, n] each
        y = torch.nn.functional.silu(gate.to(torch.float32)) * up
        return (y if weights is None else y * weights).to(x.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        codes, scale_inv, weights = restore(ctx, "SwiGLU")
        gate, up = QuantizedSide(codes, scale_inv, BLOCK_1X128, True).dequantize().chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dy, dweights = grad_output.to(torch.float32), None
        if weights is not None:
            dweights = (dy * silu * up).sum(-1, keepdim=True).to(weights.dtype)
            dy = dy * weights
        dgate = dy * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat([dgate, dy * silu], -1).to(grad_output.dtype), dweights


class _DeferredSwiGLU(torch.autograd.Function):
    """_SwiGLU of x [..., 2 n] whose result [..., n] and, with ``deferred_grad``, gradient are DeferredTensors.

    ``store`` saves x for backward in scaled FP8.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor | None, store: bool, deferred_grad: bool
    ) -> torch.Tensor:
        from ...kernels.fused_quantize import Swiglu  # loads Triton

        x = materialize(x)
        tokens = x.reshape(-1, x.shape[-1])  # [tokens, 2 n]
        ctx.x_shape, ctx.store, ctx.deferred_grad = x.shape, store, deferred_grad
        if store:
            side = native.quantize(tokens, _STORE, "rowwise").tensor.rowwise
            assert side is not None
            save(ctx, [weights, side.codes, side.scale_inv])
        else:
            save(ctx, [weights, x])
        return LazyTensor(Swiglu(tokens, weights), (*x.shape[:-1], x.shape[-1] // 2))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from ...kernels.fused_quantize import SwigluGradient, swiglu_weight_grad  # loads Triton

        weights, *saved = restore(ctx, "SwiGLU")
        dy = materialize(grad_output).reshape(-1, ctx.x_shape[-1] // 2)  # [tokens, n]
        x = saved[0].reshape(-1, ctx.x_shape[-1])
        if ctx.store:  # a code times a power of two is exact in 16 bits too
            x = QuantizedSide(x, saved[1], BLOCK_1X128, True).dequantize(dy.dtype)
        dx = LazyTensor(SwigluGradient(dy, x, weights), ctx.x_shape)
        dweights = None
        if weights is not None and ctx.needs_input_grad[1]:
            dweights = swiglu_weight_grad(dy, x).view(weights.shape).to(weights.dtype)
        return dx if ctx.deferred_grad else dx.materialize(), dweights, None, None


def _deferred_swiglu(x: torch.Tensor, weights: torch.Tensor | None, store: bool) -> torch.Tensor | None:
    """SwiGLU in an MLP whose second linear makes codes of the result; returns None elsewhere."""
    mlp = running_mlp()
    if mlp is None or not mlp.linear_fc2.makes_codes_of("input"):
        return None
    return _DeferredSwiGLU.apply(x, weights, store, mlp.linear_fc1.makes_codes_of("grad_output"))


def _swiglu_with_fp8_store(
    x: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    x = x if bias is None else x + bias
    y = _SwiGLU.apply(x.reshape(-1, x.shape[-1]), weights)  # [tokens, n]
    return y.view(*x.shape[:-1], x.shape[-1] // 2)


@patches.wrap("fusions.fused_bias_swiglu.bias_swiglu_impl", _WHY_STORE, everywhere=True)
def store_swiglu_input_in_fp8(
    original: Callable[..., torch.Tensor],
    input: torch.Tensor,
    bias: torch.Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
) -> torch.Tensor:
    """Megatron's bias_swiglu_impl: deferred between FP8 linears, and with the scaled store if requested."""
    deferred = None
    if bias is None and not cpu_offload_input:
        deferred = _deferred_swiglu(input, None, fp8_input_store)
    if deferred is not None:
        return deferred
    if not fp8_input_store:
        return original(input, bias, fp8_input_store, cpu_offload_input)
    return _swiglu_with_fp8_store(input, bias, None)


@patches.wrap("fusions.fused_bias_swiglu.weighted_bias_swiglu_impl", _WHY_STORE, everywhere=True)
def store_expert_swiglu_input_in_fp8(
    original: Callable[..., torch.Tensor],
    input: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    fp8_input_store: bool = False,
) -> torch.Tensor:
    """The same for experts, Megatron's weighted_bias_swiglu_impl: weights [tokens, 1] are the router's."""
    deferred = _deferred_swiglu(input, weights, fp8_input_store) if bias is None else None
    if deferred is not None:
        return deferred
    if not fp8_input_store:
        return original(input, bias, weights, fp8_input_store)
    return _swiglu_with_fp8_store(input, bias, weights)


_mlp: ContextVar[Any] = ContextVar("mlp", default=None)


def connect(layer: Any) -> None:
    """Sets the linear that reads each norm of a TransformerLayer."""
    for norm, reader in (
        (layer.input_layernorm, getattr(layer.self_attention, "linear_qkv", None)),
        (layer.pre_mlp_layernorm, getattr(layer.mlp, "linear_fc1", None)),
    ):
        if isinstance(norm, Norm) and norm.kind == "RMSNorm" and reader is not None and _is_ours(reader):
            norm.reader_takes_codes = functools.partial(reader.makes_codes_of, "input")


def running_mlp() -> Any:
    """Returns the MLP whose forward is running, if its linears are this package's; else, and in compiled code, None."""
    return None if torch.compiler.is_compiling() else _mlp.get()


def computes_activation(mlp: Any) -> bool:
    """Whether an MLP called now defers its activation to its second linear's kernels, where they exist."""
    reader = mlp.linear_fc2
    return _is_ours(reader) and reader.makes_codes_of("input") and _is_ours(mlp.linear_fc1)


def _is_ours(linear: Any) -> bool:
    return hasattr(linear, "makes_codes_of")


@patches.wrap("transformer.transformer_layer.TransformerLayer.__init__", _WHY_FUSED)
def connect_norms(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Connects norms to their readers."""
    original(self, *args, **kwargs)
    connect(self)


@patches.wrap("transformer.mlp.MLP.forward", _WHY_FUSED)
def find_linears(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The activation function can find the linears on both sides."""
    if torch.compiler.is_compiling():  # not in compiled code: the compiler fuses by itself
        return original(self, *args, **kwargs)
    token = _mlp.set(self if _is_ours(self.linear_fc1) and _is_ours(self.linear_fc2) else None)
    try:
        return original(self, *args, **kwargs)
    finally:
        _mlp.reset(token)

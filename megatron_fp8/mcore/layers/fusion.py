"""Norms and SwiGLU fused into the quantisation of the FP8 linear behind them.

In Megatron-Core's layer

    input_layernorm -> self_attention.linear_qkv
    pre_mlp_layernorm -> mlp.linear_fc1 -> SwiGLU -> mlp.linear_fc2

each arrow is a tensor with one reader. If the reader makes codes of it by kernels (native backend, input in FP8 in fprop
and wgrad), a LazyTensor takes its place (kernels/lazy_tensor.py); in backward, another one from SwiGLU to linear_fc1.
Which linear reads which norm is set when a layer is built. Whether that linear makes codes is checked at every call,
since warm-up, overrides and disabled regions change it. Experts that are called as one (grouped_mlp.py) are one such MLP.

Still written to memory: the result of a norm that Megatron recomputes separately, since it frees the storage of that
result and a LazyTensor has none (recognised by the reader's save_original_input, which Megatron sets); of a norm
before experts, since the router reads it too; and of LayerNorm, which has no kernel.

Rejected: fused modules in the layer spec. The model would have other parameter names, and a layer in BF16, or in its
warm-up, other modules than one in FP8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from ..patches.patching import Patch
from .norm import Norm

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


def connected(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps TransformerLayer.__init__: connects norms to their readers."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        connect(self)

    return __init__


def known_to_activation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps MLP.forward: the activation function can find the linears on both sides."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # not in compiled code: the compiler fuses by itself
            return original(self, *args, **kwargs)
        token = _mlp.set(self if _is_ours(self.linear_fc1) and _is_ours(self.linear_fc2) else None)
        try:
            return original(self, *args, **kwargs)
        finally:
            _mlp.reset(token)

    return forward


def patches() -> list[Patch]:
    """Returns the patches that connect norms, activations and linears."""
    core, why = (
        "megatron.core.transformer",
        "norms and SwiGLU before an FP8 linear are computed by its kernel",
    )
    return [
        Patch(f"{core}.transformer_layer.TransformerLayer", "__init__", connected, why, wrap=True),
        Patch(f"{core}.mlp.MLP", "forward", known_to_activation, why, wrap=True),
    ]

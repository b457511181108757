"""Replaces Megatron-Core's modules by this package's, in specs and at construction.

Specs name classes, and Megatron-Core builds all of them through ``build_module``. The config is known there, so one
rule covers every spec (GPT's, BERT's, T5's, a user's own). With ``fp8`` the classes below are built as this
package's. Without it Megatron-Core's own are built, except where they would refuse the config (their norms under
sequence parallelism, their attention under context parallelism).

Rejected: replacing the provider from which Megatron-Core's GPT specs take their classes. It has no access to the config,
so BF16 models got this package's modules; and BERT's, T5's and heterogeneous specs name their classes themselves.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from . import environment as compat
from .layers.attention import CoreAttention
from .layers.grouped_mlp import Fp8GroupedMLP
from .layers.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from .layers.moe_layer import Fp8MoELayer
from .patches.apex import norm_class

_LINEARS: dict[Any, type] = {
    ColumnParallelLinear: Fp8ColumnParallelLinear,
    RowParallelLinear: Fp8RowParallelLinear,
}


def with_own_modules(spec: Any, replaces: Callable[[type], bool] = lambda theirs: True) -> Any:
    """Returns a copy of a class, ModuleSpec, submodules, or a list of them, with this package's classes.

    Args:
        replaces: selects the Megatron-Core classes to replace; by default all that this package has a class for.
    """
    if isinstance(spec, type):
        ours = _own_class(spec)
        return spec if ours is None or not replaces(spec) else ours
    if isinstance(spec, list):
        return [with_own_modules(part, replaces) for part in spec]
    if not is_dataclass(spec):
        return spec
    own: Any = copy.copy(spec)
    # Multi-latent attention compares the class of its linears; build_module replaces them later.
    skipped = list(_LINEARS) if isinstance(spec, MLASelfAttentionSubmodules) else []
    for field in fields(own):
        part = getattr(own, field.name)
        if part not in skipped:
            setattr(own, field.name, with_own_modules(part, replaces))
    return own


def build_own_modules(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron-Core's build_module: builds this package's classes where the config has FP8 or needs them."""

    @functools.wraps(original)
    def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if config is not None:
            fp8 = getattr(config, "fp8", None)
            spec_or_module = with_own_modules(spec_or_module, lambda theirs: fp8 or _refuses(theirs, config))
            if fp8 and getattr(config, "moe_fp8_dispatch", False):
                spec_or_module = _with_fp8_dispatch(spec_or_module)
        return original(spec_or_module, *args, **kwargs)

    return build_module


def _with_fp8_dispatch(spec: Any) -> Any:
    """Returns the spec with this package's MoE layer in place of Megatron-Core's.

    Only when it is built: a transformer layer compares the class to select the arguments of its constructor.
    """
    if not isinstance(spec, ModuleSpec) or spec.module is not MoELayer:
        return spec
    own = copy.copy(spec)
    own.module = Fp8MoELayer
    return own


def final_norm_of_the_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps transformer_block._get_block_submodules: the final norm is this package's if the layers' norms are."""

    @functools.wraps(original)
    def get_block_submodules(config: Any, spec: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(config, spec, *args, **kwargs)
        submodules = getattr(spec, "submodules", None)
        if found is not submodules and getattr(submodules, "input_layernorm", None) is norm_class():
            found.layer_norm = norm_class()
        return found

    return get_block_submodules


def _own_class(theirs: Any) -> type | None:
    if theirs in _norms():
        return norm_class()
    if theirs is GroupedMLP:
        return Fp8GroupedMLP
    return CoreAttention if theirs is DotProductAttention else _LINEARS.get(theirs)


def _refuses(theirs: Any, config: Any) -> bool:
    """Whether Megatron-Core's class cannot be built from a config that this package's class accepts."""
    if theirs is DotProductAttention:
        return bool(config.context_parallel_size > 1 or config.multi_latent_attention)
    if theirs is GroupedMLP:
        return not grouped_gemm_util.grouped_gemm_is_available()
    if theirs is WrappedTorchNorm:
        return bool(config.sequence_parallel or config.layernorm_zero_centered_gamma)
    return theirs in _norms() and config.normalization != "LayerNorm"  # apex has no other


@functools.cache
def _norms() -> tuple[Any, ...]:
    """Returns the norms that Megatron-Core's specs name if Transformer Engine is not installed."""
    if not compat.has_apex():
        return (WrappedTorchNorm,)
    return (
        WrappedTorchNorm,
        importlib.import_module("megatron.core.fusions.fused_layer_norm").FusedLayerNorm,
    )

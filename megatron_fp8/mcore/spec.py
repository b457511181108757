"""Layer specs: Megatron-Core's with this package's modules, made here or replaced at construction.

Specs name classes, and Megatron-Core builds all of them through ``build_module``. The config is known there, so one
rule covers every spec (GPT's, BERT's, T5's, a user's own). With ``fp8`` or ``fp4`` the classes below are built as this
package's. Without it Megatron-Core's own are built, except where they would refuse the config (their norms under
sequence parallelism, their attention under context parallelism or with a named kernel).

Rejected: replacing the provider from which Megatron-Core's GPT specs take their classes. It has no access to the config,
so BF16 models got this package's modules; and BERT's, T5's and heterogeneous specs name their classes themselves.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ..files.atomic_io import as_value_error
from ..fp8_utils import quantizes
from . import environment as compat
from . import is_installed
from .layers.attention import CoreAttention
from .layers.attention_kernels import SDPA_KERNELS, backend_name
from .layers.grouped_mlp import Fp8GroupedMLP
from .layers.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from .layers.moe_layer import Fp8MoELayer
from .layers.norm import Norm
from .patches.patching import PatchList
from .te.context import choose_te_layers

patches = PatchList()


def get_gpt_layer_fp8_spec(config: Any) -> ModuleSpec:
    """Returns the spec of a GPT layer for this config: dense or MoE, grouped-query attention, any norm, any backend.

    Raises:
        RuntimeError: megatron_fp8.mcore.install() was not called.
        ValueError: moe_layer_freq mixes dense and MoE layers; latent experts without Transformer Engine; an option
            that grouped experts do not support; Transformer Engine was requested and cannot run.
    """
    _check(config)
    if choose_te_layers(config):
        from .te.layers import te_layer_spec  # its base classes are Transformer Engine's

        return te_layer_spec(config)
    with _layer_frequency(config):
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config, use_transformer_engine=False, **_options(config)
        )
    if any(layer is not layers[0] for layer in layers):
        raise ValueError(
            f"moe_layer_freq={config.moe_layer_freq!r} makes some layers dense and some of experts, and one layer's spec"
            " is for all layers: use megatron_fp8.mcore.spec.get_gpt_decoder_block_fp8_spec(config)"
        )
    return with_own_modules(layers[0])


def get_gpt_decoder_block_fp8_spec(
    config: Any, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Returns the specs of this pipeline stage's layers; config.moe_layer_freq selects dense or MoE for each.

    Args:
        vp_stage: the chunk, where stages are interleaved.
        pp_rank: the pipeline stage; None is this rank's.

    Raises:
        RuntimeError, ValueError: as get_gpt_layer_fp8_spec, but mixed layers are allowed.
    """
    _check(config)
    options = _options(config) | {"vp_stage": vp_stage, "pp_rank": pp_rank}
    if choose_te_layers(config):
        from .te.layers import te_block_spec  # its base classes are Transformer Engine's

        return te_block_spec(config, **options)
    with _layer_frequency(config):
        return with_own_modules(
            gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, **options)
        )


def get_gpt_mtp_block_fp8_spec(
    config: Any,
    spec: TransformerBlockSubmodules | ModuleSpec,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """Returns GPTModel's ``mtp_block_spec``: layers for multi-token prediction, equal to the last layer of ``spec``.

    None without config.mtp_num_layers, and on pipeline stages without such layers.

    Raises:
        RuntimeError: megatron_fp8.mcore.install() was not called.
        ValueError: the layers are Transformer Engine's.
    """
    _require_installed()
    if not config.mtp_num_layers:
        return None
    if choose_te_layers(config):
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} is not available with fp8_backend={config.fp8_backend!r}:"
            " its projection would be in no plan. Use another backend, or set mtp_num_layers=None"
        )
    found = gpt_layer_specs.get_gpt_mtp_block_spec(
        config, spec, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=pp_rank
    )
    return with_own_modules(found)


def _check(config: Any) -> None:
    _require_installed()
    if config.moe_latent_size and not compat.has_te():
        raise ValueError(
            f"moe_latent_size={config.moe_latent_size} needs Transformer Engine's linear: Megatron-Core makes its"
            " projections of it, and it is not installed. Set it to None"
        )
    if config.num_moe_experts and config.moe_grouped_gemm and not choose_te_layers(config):
        _check_grouped(config)


def _check_grouped(config: Any) -> None:
    if config.add_bias_linear:
        raise ValueError(
            "moe_grouped_gemm=True has no biases: set add_bias_linear=False, or moe_grouped_gemm=False"
        )
    if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ()):
        raise ValueError(
            "recompute_modules with 'moe_act' would free nothing: FP8 experts keep codes of the activation's result."
            " Leave it out, or name 'moe', which recomputes all of the experts"
        )


def _options(config: Any) -> dict[str, Any]:
    """Returns the arguments that Megatron-Core's spec functions take beside the config."""
    return {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}


def _layer_frequency(config: Any) -> AbstractContextManager[None]:
    """Context: Megatron-Core's assertion that the list is as long as the model becomes a ValueError."""
    return as_value_error(f"moe_layer_freq={config.moe_layer_freq!r}", errors=AssertionError)


def _require_installed() -> None:
    if not is_installed():
        raise RuntimeError(
            "call megatron_fp8.mcore.install() before building a model: it sets Megatron-Core's FP8 hooks"
        )


# ----------------------------------------------------------------------------------------------------- replaced classes

_CLASSES: dict[Any, type] = {
    ColumnParallelLinear: Fp8ColumnParallelLinear,
    RowParallelLinear: Fp8RowParallelLinear,
    GroupedMLP: Fp8GroupedMLP,
    DotProductAttention: CoreAttention,
}


def with_own_modules(spec: Any, replaces: Callable[[type], bool] = lambda theirs: True) -> Any:
    """Returns a copy of a class, ModuleSpec, submodules, or a list of them, with this package's classes.

    Args:
        replaces: selects the Megatron-Core classes to replace; by default all that this package has a class for.
    """
    if isinstance(spec, type):
        ours = Norm if spec in _norms() else _CLASSES.get(spec)
        return spec if ours is None or not replaces(spec) else ours
    if isinstance(spec, list):
        return [with_own_modules(part, replaces) for part in spec]
    if not is_dataclass(spec):
        return spec
    own: Any = copy.copy(spec)
    # Multi-latent attention compares the class of its linears; build_module replaces them later.
    skipped = (
        (ColumnParallelLinear, RowParallelLinear) if isinstance(spec, MLASelfAttentionSubmodules) else ()
    )
    for field in fields(own):
        part = getattr(own, field.name)
        if part not in skipped:
            setattr(own, field.name, with_own_modules(part, replaces))
    return own


@patches.wrap(
    "transformer.spec_utils.build_module",
    "specs without Transformer Engine name linears that run in BF16 whatever fp8 says",
    everywhere=True,
)
def build_own_modules(original: Callable[..., Any], spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds this package's classes where the config has FP8 or needs them."""
    config = kwargs.get("config")
    if config is not None:
        on = quantizes(config)
        spec_or_module = with_own_modules(spec_or_module, lambda theirs: on or _refuses(theirs, config))
        if on and getattr(config, "moe_fp8_dispatch", False):
            spec_or_module = _with_fp8_dispatch(spec_or_module)
    return original(spec_or_module, *args, **kwargs)


def _with_fp8_dispatch(spec: Any) -> Any:
    """Returns the spec with this package's MoE layer in place of Megatron-Core's.

    Only when it is built: a transformer layer compares the class to select the arguments of its constructor.
    """
    if not isinstance(spec, ModuleSpec) or spec.module is not MoELayer:
        return spec
    own = copy.copy(spec)
    own.module = Fp8MoELayer
    return own


@patches.wrap(
    "transformer.transformer_block._get_block_submodules",
    "the final norm of a block made from one layer's spec is not the spec's",
    everywhere=True,
)
def final_norm_of_the_layers(
    original: Callable[..., Any], config: Any, spec: Any, *args: Any, **kwargs: Any
) -> Any:
    """The final norm is this package's if the layers' norms are."""
    found = original(config, spec, *args, **kwargs)
    submodules = getattr(spec, "submodules", None)
    if found is not submodules and getattr(submodules, "input_layernorm", None) is Norm:
        found.layer_norm = Norm
    return found


def _refuses(theirs: Any, config: Any) -> bool:
    """Whether Megatron-Core's class cannot be built from a config that this package's class accepts."""
    if theirs is DotProductAttention:
        named = backend_name(config) in SDPA_KERNELS
        return bool(config.context_parallel_size > 1 or config.multi_latent_attention or named)
    if theirs is GroupedMLP:
        return not grouped_gemm_util.grouped_gemm_is_available()
    if theirs is WrappedTorchNorm:
        refused = (
            "sequence_parallel",
            "layernorm_zero_centered_gamma",
            "persist_layer_norm",
            "memory_efficient_layer_norm",
        )
        return any(getattr(config, name) for name in refused)
    if theirs is torch.nn.LayerNorm:  # CLIPViTModel's default, and it takes no config
        return True
    return theirs in _norms() and config.normalization != "LayerNorm"  # apex has no other


@functools.cache
def _norms() -> tuple[Any, ...]:
    """Returns the norms that Megatron-Core's specs name if Transformer Engine is not installed."""
    if not compat.has_apex():
        return WrappedTorchNorm, torch.nn.LayerNorm
    return (
        WrappedTorchNorm,
        torch.nn.LayerNorm,
        importlib.import_module("megatron.core.fusions.fused_layer_norm").FusedLayerNorm,
    )


# ---------------------------------------------------------------------------------------------------------------- --spec


def __getattr__(name: str) -> ModuleSpec:
    if name == "gpt_layer_fp8_spec":  # it is an attribute of this module after install()
        _require_installed()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def offer() -> None:
    """Defines `gpt_layer_fp8_spec`, the spec of a dense layer, in this module while the hooks are installed.

    Megatron-LM's --spec reads an object from vars(module) and never calls it, so neither a function nor a lazy
    attribute would work.
    """
    if is_installed():
        globals()["gpt_layer_fp8_spec"] = with_own_modules(gpt_layer_specs.get_gpt_layer_local_spec())
    else:
        globals().pop("gpt_layer_fp8_spec", None)


offer()

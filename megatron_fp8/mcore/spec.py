"""Layer specs: Megatron-Core's GPT specs with this package's modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from . import environment as compat
from . import is_installed
from .spec_replacement import with_own_modules
from .te.context import choose_te_layers


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
    with _layer_frequency(config), _without_advice():
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
    with _layer_frequency(config), _without_advice():
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


@contextmanager
def _layer_frequency(config: Any) -> Iterator[None]:
    """Turns Megatron-Core's assertion that the list is as long as the model into a ValueError."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(f"moe_layer_freq={config.moe_layer_freq!r}: {error}") from error


@contextmanager
def _without_advice() -> Iterator[None]:
    """Hides Megatron-Core's advice to use Transformer Engine instead of its GroupedMLP, which this package replaces."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The legacy GroupedMLP")
        yield


def _require_installed() -> None:
    if not is_installed():
        raise RuntimeError(
            "call megatron_fp8.mcore.install() before building a model: it sets Megatron-Core's FP8 hooks"
        )


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

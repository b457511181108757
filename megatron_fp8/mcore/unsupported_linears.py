"""Refusal of linears outside the plan, which would silently run in BF16.

``fp8_overrides`` with the value 'bf16' for a linear's name allows it. Without FP8 nothing is refused.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from ..fp8_utils import quantizes, switch_shown
from ..plan.overrides import whole_override
from .names import in_whole_model


def is_te_linear(module: Any) -> bool:
    """Whether a module's GEMMs are Transformer Engine's, by its classes' names: it need not be installed."""
    kind: Any = type(module)
    return _is_te(kind)


@functools.lru_cache(maxsize=64)
def _is_te(kind: type) -> bool:
    return any(
        base.__module__.startswith("transformer_engine.") and base.__name__.endswith(("Linear", "MLP"))
        for base in kind.__mro__
    )


def unsupported_linears(model: Any) -> dict[str, str]:
    """Returns the model's layer linears that are no FP8 sites: name -> description and remedy."""
    kinds = {kind: what for kind in set(map(type, model.modules())) if (what := _describe(kind)) is not None}
    found = {
        name: kinds[type(module)]
        for name, module in model.named_modules()
        if type(module) in kinds
        and re.search(r"(^|\.)layers\.\d+\.", name)
        and quantizes(getattr(module, "config", model.config))  # a vision model's may be off
    }
    whole = in_whole_model(model) if found else str
    return {whole(name): what for name, what in found.items()}


def refuse_unsupported_layers(model: Any) -> None:
    """Raises ValueError if FP8 is on and a layer linear would run in BF16 without a 'bf16' override in fp8_overrides."""
    config = model.config
    for name, what in unsupported_linears(model).items() if quantizes(config) else ():
        override = whole_override(name, getattr(config, "fp8_overrides", None) or {})
        if override is None or override.value != "bf16":
            raise ValueError(
                f"{switch_shown(config)} was asked for, but {name} is {what}; or say that it runs in BF16:"
                f" config.fp8_overrides = {{{name!r}: 'bf16'}}"
            )


def refuse_fp8_parts(model: Any) -> None:
    """Raises ValueError if FP8 is off in the model's config and on in that of a part, as of LLaVA's vision model."""
    if quantizes(model.config):
        return
    for name, module in model.named_modules():
        if hasattr(type(module), "bind_fp8_site") and quantizes(module.config):
            raise ValueError(
                f"{switch_shown(module.config)} is set for {name}, and not for the model that has it, whose config ends"
                " the iterations: set it there too. config.fp8_overrides = {'language_model.*': 'bf16'} keeps other"
                " parts in BF16"
            )


def require_mtp_block(model: Any) -> None:
    """Raises ValueError if FP8 and multi-token prediction are on and the last stage's model has no layers for it."""
    config = model.config
    layers = getattr(config, "mtp_num_layers", None)
    if (
        quantizes(config)
        and layers
        and getattr(model, "post_process", False)
        and not getattr(model, "mtp_process", True)
    ):
        raise ValueError(
            f"mtp_num_layers={layers} and the model has no layers for it: give GPTModel"
            " mtp_block_spec=megatron_fp8.mcore.spec.get_gpt_mtp_block_fp8_spec(config, transformer_layer_spec), or set"
            " mtp_num_layers=None"
        )


def _describe(kind: type) -> str | None:
    """Returns the description and remedy if modules of this class are linears outside the plan, else None."""
    if hasattr(kind, "bind_fp8_site"):
        return None
    if _is_te(kind):
        return (
            "Transformer Engine's linear, which runs in BF16: build the model from"
            " megatron_fp8.mcore.spec.get_gpt_layer_fp8_spec(config) (Mamba hybrids have no other layers: fp8=None)"
        )
    if kind in (ColumnParallelLinear, RowParallelLinear):
        return (
            "Megatron-Core's plain linear, which runs in BF16: call megatron_fp8.mcore.install() before the model is"
            " built, and build it from a layer spec, such as megatron_fp8.mcore.spec.get_gpt_layer_fp8_spec(config)"
        )
    if issubclass(kind, (ColumnParallelLinear, RowParallelLinear)):
        return f"a {kind.__name__}, whose own forward runs in BF16: name Megatron-Core's linear in the spec"
    if kind.__name__ == "GroupedMLP":
        return (
            "Megatron-Core's GroupedMLP, which runs in BF16: build the model from"
            " megatron_fp8.mcore.spec.get_gpt_layer_fp8_spec(config), or set moe_grouped_gemm=False"
        )
    return None

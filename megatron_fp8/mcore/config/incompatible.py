"""Settings that exclude each other, and recipes that some do not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...backends.transformer_engine import name as TE
from ...backends.transformer_engine import unmapped
from ...fp8_utils import get_fp8_recipe, quantizes, recipe_name_of, recipe_setting
from ...numerics.rule import Rule
from ...plan.overrides import Override
from ...plan.site_plan import has_token_scales, whose_scale


class _Other(NamedTuple):
    """A setting whose value is refused beside another setting."""

    name: str
    why: str
    remedy: str = "False"
    is_refused: Callable[[Any], bool] = bool


def _is_false(value: Any) -> bool:
    return not value


_WARMUP, _HEALING = "fp8_high_precision_warmup", "fp8_high_precision_healing"

# Setting -> (its value without effect, what it excludes). For recipes see the functions below.
_EXCLUDES: dict[str, tuple[str, tuple[_Other, ...]]] = {
    "moe_fp8_dispatch": ("False", (
        _Other("moe_token_dispatcher_type", "kernels of its own (DeepEP, HybridEP) send the tokens",
               "'alltoall' or 'allgather'", lambda value: value == "flex"),
        _Other("fp8_wgrad", "weight gradients in high precision read values that were never quantized, and only codes"
               " arrive", "True", _is_false),
        _Other("moe_shared_expert_overlap", "the dispatcher would pass codes to shared experts, which read values"),
        _Other("moe_apply_probs_on_input", "tokens that arrive as codes are not multiplied"),
        _Other("moe_permute_fusion", "Transformer Engine's permutation does not move codes"),
        _Other("moe_latent_size", "the latent projection is no linear of this package", "None"),
        _Other("add_bias_linear", "the gradient of the experts' biases is a sum of values, and only codes arrive"),
    )),
    "fp8_guard": ("False", (
        _Other("fp8_param", "a site that moves to BF16 needs a BF16 weight, and fp8_param keeps it in FP8"),
        _Other("tp_only_amax_red", "data-parallel ranks have their own amaxes, and would move different sites"),
    )),
    "fp8_size_filter": ("None", (_Other("fp8_wgrad", "its times are of three GEMMs in FP8", "True", _is_false),)),
    "fp8_output_layer": ("False", (
        _Other("defer_embedding_wgrad_compute", "Megatron-Core computes the deferred gradient of the output layer's"
               " weight in BF16"),
    )),
    "fp8_param": ("False", (
        _Other(_WARMUP, "a phase in BF16 needs BF16 weights", "0"),
        _Other(_HEALING, "a phase in BF16 needs BF16 weights", "0"),
    )),
    "fp8_backend": ("'native'", (
        _Other("fp8_wgrad", "its linears have no weight gradient in BF16", "True", _is_false),
        _Other("fp8_param", "FP8 weights are this package's own"),
        _Other("fp8_size_filter", "its table is of this package's GEMMs", "None"),
        _Other(_WARMUP, "phases in BF16 are this package's", "0"),
        _Other(_HEALING, "phases in BF16 are this package's", "0"),
        _Other("fp8_output_layer", "the output projection is none of its layers"),
        _Other("fp8_guard", "it does not expose the amaxes that the guard needs"),
        _Other("num_moe_experts", "it shares amaxes between ranks that hold different experts", "None"),
    )),
}  # fmt: skip


def check_incompatible(config: Any) -> None:
    """Raises ValueError for settings of an FP8 config that exclude each other."""
    for setting, (off, others) in _EXCLUDES.items():
        value = getattr(config, setting)
        if not _has_effect(setting, value, config):
            continue
        for other in others:
            found = getattr(config, other.name)
            if other.is_refused(found):
                raise ValueError(
                    f"{setting}={value!r} with {other.name}={found!r}: {other.why}. Set {other.name}={other.remedy}, or"
                    f" {setting}={off}."
                )
    if _has_effect("moe_fp8_dispatch", config.moe_fp8_dispatch, config):
        _check_dispatched(config)
    if wants_te(config):
        _check_te_recipe(config)


def _has_effect(setting: str, value: Any, config: Any) -> bool:
    if setting == "fp8_backend":
        return wants_te(config)
    return bool(value) and (setting != "moe_fp8_dispatch" or bool(config.num_moe_experts))


def _check_dispatched(config: Any) -> None:
    recipe, named = get_fp8_recipe(config), f"{recipe_setting(config)}={recipe_name_of(config)!r}"
    for role in ("input", "grad_output"):
        rule: Rule | None = recipe.rule(role)
        if rule is None:
            raise ValueError(
                f"moe_fp8_dispatch=True with {named}, which leaves {role} in high precision:"
                " there are no codes to send. Quantize it, or set moe_fp8_dispatch=False."
            )
        if not has_token_scales(rule):
            raise ValueError(
                f"moe_fp8_dispatch=True with {named}: it has one scale per"
                f" {whose_scale(rule)}, and an expert's tokens come from many ranks, each with another. Set"
                f"{' fp4=None, fp8 and' if config.fp4 else ''} fp8_recipe to"
                " 'blockwise', 'mxfp8' or 'rowwise', whose scales travel with a token, or moe_fp8_dispatch=False."
            )


def wants_te(config: Any) -> bool:
    """Whether this config requests Transformer Engine's layers for what is quantized."""
    return quantizes(config) and getattr(config, "fp8_backend", None) == TE


def _check_te_recipe(config: Any) -> None:
    for glob, target in config.fp8_overrides.items():
        if target != "bf16" or Override.of(glob, target).part:
            raise ValueError(
                f"fp8_overrides[{glob!r}]={target!r} cannot be had from fp8_backend={TE!r}: its context has one recipe"
                " for all layers. Override whole layers with 'bf16', or use fp8_backend='native'"
            )
    reason = unmapped(get_fp8_recipe(config))
    if reason is not None:
        other = "leave it out" if config.fp4 else "use fp8_backend='native', or drop the setting"
        raise ValueError(f"fp8_backend={TE!r}: {reason}; {other}")

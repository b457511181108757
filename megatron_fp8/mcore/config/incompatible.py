"""Settings that `moe_fp8_dispatch` or Transformer Engine's layers do not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...backends.transformer_engine import name as TE
from ...backends.transformer_engine import unmapped
from ...fp8_utils import get_fp8_recipe
from ...numerics.rule import Rule
from ...plan.overrides import Override


def _is_false(value: Any) -> bool:
    return not value


# (setting, whether its value is refused, why, remedy).
_WITH_DISPATCH: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        "kernels of its own (DeepEP, HybridEP) send the tokens",
        "'alltoall' or 'allgather'",
    ),
    (
        "fp8_wgrad",
        _is_false,
        "weight gradients in high precision read values that were never quantized, and only codes arrive",
        "True",
    ),
    (
        "moe_shared_expert_overlap",
        bool,
        "the dispatcher would pass codes to shared experts, which read values",
        "False",
    ),
    ("moe_apply_probs_on_input", bool, "tokens that arrive as codes are not multiplied", "False"),
    ("moe_permute_fusion", bool, "Transformer Engine's permutation does not move codes", "False"),
    ("moe_latent_size", bool, "the latent projection is no linear of this package", "None"),
    (
        "add_bias_linear",
        bool,
        "the gradient of the experts' biases is a sum of values, and only codes arrive",
        "False",
    ),
)

# (setting, whether its value is refused, why). For recipes see ``unmapped`` in backends/transformer_engine.py.
_WITH_TE: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("fp8_wgrad", _is_false, "its linears have no weight gradient in BF16"),
    ("fp8_param", bool, "FP8 weights are this package's own"),
    ("fp8_size_filter", bool, "its table is of this package's GEMMs"),
    ("fp8_high_precision_warmup", bool, "phases in BF16 are this package's"),
    ("fp8_high_precision_healing", bool, "phases in BF16 are this package's"),
    ("fp8_output_layer", bool, "the output projection is none of its layers"),
    ("fp8_guard", bool, "it does not expose the amaxes that the guard needs"),
    ("num_moe_experts", bool, "it shares amaxes between ranks that hold different experts"),
)


def check_dispatch(config: Any) -> None:
    """Raises ValueError for a setting that tokens in FP8 do not support; checks nothing if moe_fp8_dispatch is off."""
    if not (config.moe_fp8_dispatch and config.num_moe_experts):
        return
    for setting, is_refused, why, remedy in _WITH_DISPATCH:
        value = getattr(config, setting)
        if is_refused(value):
            raise ValueError(
                f"moe_fp8_dispatch=True with {setting}={value!r}: {why}. Set it to {remedy}, or set"
                " moe_fp8_dispatch=False."
            )
    recipe = get_fp8_recipe(config)
    for role in ("input", "grad_output"):
        rule: Rule | None = recipe.rule(role)
        if rule is None:
            raise ValueError(
                f"moe_fp8_dispatch=True with fp8_recipe={config.fp8_recipe!r}, which leaves {role} in high precision:"
                " there are no codes to send. Quantize it, or set moe_fp8_dispatch=False."
            )
        if rule.granularity.rows != 1:
            raise ValueError(
                f"moe_fp8_dispatch=True with fp8_recipe={config.fp8_recipe!r}: it has one scale per"
                f" {rule.granularity}, and an expert's tokens come from many ranks, each with another. Set fp8_recipe to"
                " 'blockwise', 'mxfp8' or 'rowwise', whose scales travel with a token, or moe_fp8_dispatch=False."
            )


def wants_te(config: Any) -> bool:
    """Whether this config requests FP8 with Transformer Engine's layers."""
    return bool(config.fp8) and getattr(config, "fp8_backend", None) == TE


def check_te_settings(config: Any) -> None:
    """Raises ValueError for a setting that Transformer Engine's layers would ignore, if they are the backend."""
    if not wants_te(config):
        return
    for setting, is_refused, why in _WITH_TE:
        value = getattr(config, setting)
        if is_refused(value):
            raise ValueError(
                f"{setting}={value!r} cannot be had from fp8_backend={TE!r}: {why}. Use fp8_backend='native', or drop"
                f" {setting}"
            )
    for glob, target in config.fp8_overrides.items():
        if target != "bf16" or Override.of(glob, target).part:
            raise ValueError(
                f"fp8_overrides[{glob!r}]={target!r} cannot be had from fp8_backend={TE!r}: its context has one recipe"
                " for all layers. Override whole layers with 'bf16', or use fp8_backend='native'"
            )
    reason = unmapped(get_fp8_recipe(config))
    if reason is not None:
        raise ValueError(f"fp8_backend={TE!r}: {reason}. Use fp8_backend='native', or drop the setting")

"""Checks of `moe_fp8_dispatch` against other settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...fp8_utils import get_fp8_recipe
from ...numerics.rule import Rule

# (setting, whether its value is refused, why, remedy).
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "moe_token_dispatcher_type",
        lambda value: value == "flex",
        "kernels of its own (DeepEP, HybridEP) send the tokens",
        "Set it to 'alltoall' or 'allgather'",
    ),
    (
        "fp8_wgrad",
        lambda value: not value,
        "weight gradients in high precision read values that were never quantised, and only codes arrive",
        "Set it to True",
    ),
    (
        "moe_shared_expert_overlap",
        bool,
        "the dispatcher would pass codes to shared experts, which read values",
        "Set it to False",
    ),
    (
        "moe_apply_probs_on_input",
        bool,
        "tokens that arrive as codes are not multiplied",
        "Set it to False",
    ),
    ("moe_permute_fusion", bool, "Transformer Engine's permutation does not move codes", "Set it to False"),
    (
        "moe_latent_size",
        bool,
        "the latent projection is no linear of this package",
        "Set it to None",
    ),
    (
        "add_bias_linear",
        bool,
        "the gradient of the experts' biases is a sum of values, and only codes arrive",
        "Set it to False",
    ),
)


def check_dispatch(config: Any) -> None:
    """Raises ValueError for a setting that tokens in FP8 do not support; checks nothing if moe_fp8_dispatch is off."""
    if not (config.moe_fp8_dispatch and config.num_moe_experts):
        return
    for setting, refused, why, remedy in _REFUSED:
        value = getattr(config, setting)
        if refused(value):
            raise ValueError(
                f"moe_fp8_dispatch=True with {setting}={value!r}: {why}. {remedy}, or set moe_fp8_dispatch=False."
            )
    recipe = get_fp8_recipe(config)
    for role in ("input", "grad_output"):
        rule: Rule | None = recipe.rule(role)
        if rule is None:
            raise ValueError(
                f"moe_fp8_dispatch=True with fp8_recipe={config.fp8_recipe!r}, which leaves {role} in high precision:"
                " there are no codes to send. Quantise it, or set moe_fp8_dispatch=False."
            )
        if rule.granularity.rows != 1:
            raise ValueError(
                f"moe_fp8_dispatch=True with fp8_recipe={config.fp8_recipe!r}: it has one scale per"
                f" {rule.granularity}, and an expert's tokens come from many ranks, each with another. Set fp8_recipe to"
                " 'blockwise', 'mxfp8' or 'rowwise', whose scales travel with a token, or moe_fp8_dispatch=False."
            )

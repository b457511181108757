"""Refuses settings that Transformer Engine's layers would silently ignore."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...backends.transformer_engine import name, unmapped
from ...fp8_utils import get_fp8_recipe
from ...plan.overrides import Override

if TYPE_CHECKING:
    from ..config.transformer_config import TransformerConfig

# (setting, whether its value is refused, why). For recipes see ``unmapped`` in backends/transformer_engine.py.
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("fp8_wgrad", lambda value: not value, "its linears have no weight gradient in BF16"),
    ("fp8_param", bool, "FP8 weights are this package's own"),
    ("fp8_size_filter", bool, "its table is of this package's GEMMs"),
    ("fp8_high_precision_warmup", bool, "phases in BF16 are this package's"),
    ("fp8_high_precision_healing", bool, "phases in BF16 are this package's"),
    ("fp8_output_layer", bool, "the output projection is none of its layers"),
    ("fp8_guard", bool, "it does not expose the amaxes that the guard needs"),
    ("num_moe_experts", bool, "it shares amaxes between ranks that hold different experts"),
)


def wants_te(config: Any) -> bool:
    """Whether this config requests FP8 with Transformer Engine's layers."""
    return bool(config.fp8) and getattr(config, "fp8_backend", None) == name


def check_te_settings(config: TransformerConfig) -> None:
    """Raises ValueError for a setting that Transformer Engine's layers do not support, if they are the backend."""
    if not wants_te(config):
        return
    for setting, refused, why in _REFUSED:
        value = getattr(config, setting)
        if refused(value):
            raise ValueError(
                f"{setting}={value!r} cannot be had from fp8_backend={name!r}: {why}. Use fp8_backend='native', or drop"
                f" {setting}"
            )
    for glob, target in config.fp8_overrides.items():
        if target != "bf16" or Override.of(glob, target).part:
            raise ValueError(
                f"fp8_overrides[{glob!r}]={target!r} cannot be had from fp8_backend={name!r}: its context has one recipe"
                " for all layers. Override whole layers with 'bf16', or use fp8_backend='native'"
            )
    reason = unmapped(get_fp8_recipe(config))
    if reason is not None:
        raise ValueError(f"fp8_backend={name!r}: {reason}. Use fp8_backend='native', or drop the setting")

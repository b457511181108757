"""Bytes that single operations of a layer save for backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..numerics.rule import Rule
from .attention import gathers_input
from .model import Model
from .settings import Settings
from .sites import Plans, side_scales

Bytes = Counter[str]
"""Kind -> bytes: 'norms', 'linear inputs', 'attention', 'activation function', 'dropout', 'layer inputs', 'routing' (of
experts), 'ends'."""


@dataclass(frozen=True)
class Device:
    """Device-dependent sizes of saved tensors.

    Attributes:
        mask: bytes per value of a dropout mask.
        writes_out: whether attention stores masks of parts of a sequence, and scores if values and keys
            differ in width.
    """

    mask: int = 1
    writes_out: bool = False


CPU = Device(mask=2, writes_out=True)
GPU = Device()


def norm(settings: Settings, tokens: int, width: int | None = None) -> Bytes:
    """A norm's input [tokens, width], plus one float32 per row (RMSNorm) or two (LayerNorm; on CPUs in 16
    bits).

    Args:
        width: None: hidden_size.
    """
    model = settings.model
    each = 4 if model.normalization == "RMSNorm" else 8
    return Bytes({"norms": tokens * (model.activation_bytes * (width or model.hidden_size) + each)})


def dropout(settings: Settings, device: Device) -> int:
    """The mask of a layer's hidden states."""
    model = settings.model
    if not model.hidden_dropout:
        return 0
    return device.mask * settings.tokens // model.token_share * model.hidden_size


def linear_input(settings: Settings, plans: Plans, site: str, layer: int | None, k: int, tokens: int) -> int:
    """wgrad's operand [k, tokens]: codes and scales, or values."""
    rule = kept_rule(settings, plans, site, layer, tokens)
    if rule is None:
        return settings.model.activation_bytes * k * tokens
    return k * tokens + side_scales(rule, k, tokens)


def kept_rule(settings: Settings, plans: Plans, site: str, layer: int | None, tokens: int) -> Rule | None:
    """The rule by which a linear's saved input is quantised for wgrad; None if it saves high-precision values."""
    model = settings.model
    plan = plans.of(site, layer)
    cast = plan.operands["wgrad"]["input"]
    if plan.precision == "bf16" or cast is None:
        return None
    gathers = model.sequence_parallel and gathers_input(site)
    block = max(cast.rule.granularity.rows, cast.rule.granularity.cols)
    whole = cast.rule.granularity.is_tensor or not cast.rule.granularity.cols or tokens % block == 0
    return cast.rule if whole or not gathers else None


def recomputed_modules(model: Model) -> frozenset[str]:
    """Modules that are recomputed in backward. Raises ValueError for one without an estimate."""
    if model.recompute_granularity != "selective":
        return frozenset()
    modules = frozenset(model.recompute_modules or ["core_attn"])
    for module in modules - set(RECOMPUTED):
        raise ValueError(
            f"model.recompute_modules: no estimate is known for {module!r}; it is for {', '.join(RECOMPUTED)}."
        )
    return modules


RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "moe", "shared_experts")
"""Supported recompute_modules; the last three are for experts."""


def runs_again(model: Model, site: str) -> bool:
    """Whether recompute_modules repeats this linear's forward in backward."""
    modules = recomputed_modules(model)
    within = {
        "mla_up_proj": site.endswith(("_up_proj", "linear_q_proj")),
        "mlp": ".mlp.linear_" in site,
        "shared_experts": ".shared_experts." in site,
        "moe": "experts." in site,
    }
    return any(is_within for module, is_within in within.items() if module in modules)

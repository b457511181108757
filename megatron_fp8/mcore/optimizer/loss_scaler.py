"""Loss scaling under Megatron-Core: one overflow status for all ranks.

Megatron-Core 0.16 lets each optimizer of a chain (dense weights, experts) check for overflow in its own group, and
update its own scaler at once. That has three silent faults:

* the loss is multiplied by the first scaler's scale and each optimizer divides by its own: after an overflow in an
  expert they differ, and the experts' gradients are wrong by powers of two;
* an FP8 cast saturates an Inf, so gradients look finite, the step counts as clean, and the scale never decreases;
* without the distributed optimizer every data-parallel replica decides for itself. Gradients are normally equal
  there, but if a fault makes them differ, one replica steps, the other does not, and they diverge permanently.

So the scalers do nothing while optimizers prepare their gradients; then one collective over all ranks combines the
overflows in gradients and in FP8 casts, and every scaler gets the same result. Rejected: using Megatron-Core's
DynamicGradScaler. A growth and not a clean step resets its hysteresis, so two overflows a thousand steps apart count
as consecutive; correcting that from outside takes as many lines as the rule itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import MegatronGradScaler

from ...state.loss_scaler import LossScaler, agree
from ..patches.megatron_fixes import settle_biases
from ..patches.patching import PatchList
from .optimizer_setup import parts_of, runtimes_stepped_by

MAX_SCALE = 2.0**32
"""The upper bound, for which Megatron-Core has no option; it is Megatron-Core's own initial scale."""


class Float16GradScaler(MegatronGradScaler):
    """LossScaler in place of Megatron-Core's DynamicGradScaler; arguments as there.

    ``rule`` counts ``skipped`` steps. The upper bound is ``MAX_SCALE``, or the initial scale if that is larger.
    """

    _scale: torch.Tensor

    def __init__(
        self,
        initial_scale: float,
        min_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        hysteresis: int,
    ) -> None:
        self.rule = LossScaler(
            initial_scale,
            growth_factor,
            backoff_factor,
            int(growth_interval),  # a float by Megatron-Core's default type
            hysteresis,
            min_scale,
            max(MAX_SCALE, initial_scale),
        )
        super().__init__(initial_scale)

    def update(self, found_inf: bool) -> None:
        """Ignores one optimizer's result: ``settle`` gets the result of all."""

    def settle(self, overflow: bool) -> None:
        """Updates the scale by the overflow status of all optimizers, casts and ranks."""
        self.rule.update(overflow)
        self._take_scale()

    def state_dict(self) -> dict[str, Any]:
        """Returns Megatron-Core's names, and ``skipped``; scale float32 [1]."""
        rule = self.rule
        return {
            "scale": self._scale,
            "growth_tracker": rule.clean_steps,
            "hysteresis_tracker": rule.hysteresis - rule.overflows,
            "skipped": rule.skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads this scaler's state, or that of Megatron-Core's own."""
        rule = self.rule
        rule.load_state_dict(
            {
                "scale": float(state_dict["scale"]),
                "clean_steps": int(state_dict["growth_tracker"]),
                "overflows": max(rule.hysteresis - int(state_dict["hysteresis_tracker"]), 0),
                "skipped": int(state_dict.get("skipped", 0)),
            }
        )
        self._take_scale()

    def _take_scale(self) -> None:
        # A new tensor: code that holds the old one needs the old scale.
        self._scale = torch.full_like(self._scale, self.rule.scale)


patches = PatchList("megatron.core.optimizer")
patches.replace(
    "grad_scaler.DynamicGradScaler",
    Float16GradScaler,
    "its hysteresis is not consecutive, it has no upper bound, and it uses one optimizer's overflow alone",
    everywhere=True,
)


def set_max_scale(optimizer: Any, max_scale: float) -> None:
    """Sets the upper bound of an optimizer's dynamic loss scalers. ValueError if it is below the scale."""
    for scaler in scalers(optimizer):
        scaler.rule = replace(scaler.rule, max_scale=max_scale)


def scalers(optimizer: Any) -> list[Float16GradScaler]:
    """Returns the dynamic loss scalers of an optimizer or a chain, all in the same state; empty unless it is FP16."""
    found = [getattr(part, "grad_scaler", None) for part in parts_of(optimizer)]
    return [scaler for scaler in found if isinstance(scaler, Float16GradScaler)]


_preparing: ContextVar[bool] = ContextVar("preparing", default=False)
"""Whether an optimizer in this call stack prepares its gradients: only the outermost, a chain, settles."""


def decide_skip(original: Callable[[Any], Any], self: Any) -> bool:
    """Whether to skip the step, in prepare_grads: the same on all ranks, for gradients and for the FP8 casts of the
    models that the optimizer steps."""
    if _preparing.get():
        return bool(original(self))
    token = _preparing.set(True)
    try:
        overflow = bool(original(self))
    finally:
        _preparing.reset(token)
    runtimes = runtimes_stepped_by(self)
    skipped = _settle(self, overflow or any(runtime.found_nonfinite for runtime in runtimes))
    for runtime in runtimes:
        settle_biases(runtime, skipped=skipped)
    return skipped


for _owner in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer"):
    patches.wrap(
        f"optimizer.{_owner}.prepare_grads",
        "each optimizer of a chain decides for itself, and none sees what FP8 casts saturated",
    )(decide_skip)


def _settle(optimizer: Any, overflow: bool) -> bool:
    # Without a scaler no gradient is checked, and all ranks already know the casts' status.
    if any(getattr(part, "grad_scaler", None) is not None for part in parts_of(optimizer)):
        overflow = agree(overflow)
    for scaler in scalers(optimizer):
        scaler.settle(overflow)
    return overflow

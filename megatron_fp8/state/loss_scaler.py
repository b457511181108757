"""Dynamic loss scaling, for gradients in float16.

float16's smallest number is 6e-8, and gradients are often smaller. The loss is multiplied by a scale before the
backward pass, and gradients are divided by it after. The best scale is the largest without overflow. It changes
during training, so the search never ends: an overflow skips the step and, if repeated, lowers the scale; many steps
without overflow raise it (Micikevicius et al., arXiv 1710.03740).

Plain PyTorch (trainer.py) and Megatron-Core (mcore/optimizer/loss_scaler.py) share the rule here, because no existing
scaler does what the documentation promises. torch.amp.GradScaler has no hysteresis and no bounds, and does not
communicate with other ranks. Megatron-Core's counts overflows that are not consecutive in its hysteresis, has no
upper bound, and has separate scalers for dense and expert weights, which drift apart. The arithmetic on gradients is
torch's own kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..files.terminal import warn_user

STUCK = 20
"""Consecutive overflows at the smallest scale after which training counts as stuck."""


@dataclass
class LossScaler:
    """The loss scale of one training. Every rank has one and passes it the same overflow flags, so that all stay equal.

    Attributes:
        initial_scale: the first scale.
        growth_factor: multiplies the scale after ``growth_interval`` consecutive steps without an overflow.
        backoff_factor: multiplies the scale at an overflow, once there have been ``hysteresis`` in succession.
        growth_interval: see growth_factor; an overflow or a growth restarts its count.
        hysteresis: consecutive overflows that lower the scale: the first ``hysteresis - 1`` only skip their steps,
            that one and each that directly follows lower the scale. A step without an overflow restarts the count. 1:
            every overflow lowers the scale.
        min_scale, max_scale: bounds of the scale. Overflows at min_scale still skip steps; ``STUCK`` of them in
            succession give a warning.
        scale: the current scale. If both factors are powers of two, it changes no bit of a gradient.
        clean_steps, overflows: steps since the last overflow or growth; consecutive overflows.
        skipped: overflows (skipped steps) of the whole training.

    Raises ValueError: a value is out of range.
    """

    initial_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    scale: float = field(init=False)
    clean_steps: int = field(init=False, default=0)
    overflows: int = field(init=False, default=0)
    skipped: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale < math.inf:
            raise ValueError(
                f"min_scale={self.min_scale!r}, initial_scale={self.initial_scale!r}, max_scale={self.max_scale!r} must"
                " be finite, above 0 and in this order: lower the one on the left or raise the one on the right."
            )
        if not 1 < self.growth_factor < math.inf:
            raise ValueError(f"growth_factor={self.growth_factor!r} must be finite and above 1, such as 2.")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor={self.backoff_factor!r} must be between 0 and 1, such as 0.5.")
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        self.scale = float(self.initial_scale)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns float32 ``loss`` times the scale, for backward()."""
        return loss.float() * self.scale

    def update(self, overflow: bool) -> None:
        """Records a step; ``overflow`` (on any rank) means it was skipped. Warns as ``min_scale`` says."""
        if overflow:
            self.skipped += 1
            self.overflows += 1
            self.clean_steps = 0
            if self.scale == self.min_scale and self.overflows % STUCK == 0:
                warn_user(
                    f"{self.overflows} steps in direct succession overflowed and were skipped, and the loss scale is at"
                    f" min_scale={self.min_scale:g}: weights or data hold NaN or Inf, or the learning rate is too high."
                    " Go back to an earlier checkpoint"
                )
            if self.overflows >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.overflows = 0
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.clean_steps = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: scale, clean_steps, overflows, skipped."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores ``state_dict``. The options stay this scaler's own; a scale outside their bounds is clamped.

        Raises ValueError, and changes nothing: a number is missing or impossible.
        """
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise ValueError(f"the loss scaler's state lacks {', '.join(missing)}: it has {sorted(state)}")
        scale, counts = float(state["scale"]), [int(state[name]) for name in _STATE[1:]]
        if not 0 < scale < math.inf or min(counts) < 0:
            raise ValueError(f"the loss scaler's state {state} is impossible: the checkpoint is damaged")
        self.scale = min(max(scale, self.min_scale), self.max_scale)
        # A shorter interval may be below the count, which would then never reach it.
        self.clean_steps, self.overflows, self.skipped = counts
        self.clean_steps = min(self.clean_steps, self.growth_interval - 1)


_STATE = ("scale", "clean_steps", "overflows", "skipped")


@torch.no_grad()
def unscale_(grads: Iterable[torch.Tensor], scale: float) -> bool:
    """Divides gradients by ``scale`` in place; returns whether one of them had NaN or Inf.

    Args:
        grads: float32 or bfloat16, any shapes and devices; of a DTensor the local part.

    Raises ValueError for float16 gradients: dividing would turn small ones into zero.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        if local.dtype == torch.float16:
            raise ValueError(
                "a float16 gradient cannot be unscaled in place: keep the parameters in float32 and run the model under"
                " torch.autocast(dtype=torch.float16)"
            )
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    found = []
    for (device, _), same in by_kind.items():
        found.append(torch.zeros(1, device=device, dtype=torch.float32))
        inverse = torch.full((1,), 1.0 / scale, device=device, dtype=torch.float32)
        torch._amp_foreach_non_finite_check_and_unscale_(same, found[-1], inverse)
    return any(bool(flag) for flag in found)


def agree(overflow: bool, group: Any = None) -> bool:
    """Whether any rank of ``group`` (None: all) has an overflow. Collective if torch.distributed is initialised."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return overflow
    on_gpu = dist.get_backend(group) == "nccl"
    worst = torch.tensor(
        [float(overflow)], device=torch.cuda.current_device() if on_gpu else "cpu", dtype=torch.float32
    )
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return bool(worst)

"""Quantizes a tensor by another recipe, for the same statistics.

Most recipes compute scales from the current tensor, so nothing else is needed. Delayed scaling uses earlier
iterations: ``WhatIfHistory`` stores their amaxes and must be updated in every iteration, measured or not.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends import reference
from ..backends.base import CastRequest
from ..numerics.formats import E2M1, E4M3, FloatFormat
from ..numerics.rule import Direction, Rule
from ..numerics.scaling import compute_scale
from ..numerics.subnormals import keep_subnormals
from ..recipe import RECIPES, DelayedScaling
from ..state.amax_history import AmaxRingBuffer
from ..state.arena import Arena
from ..state.fp8_state import Fp8State
from ..tensor import Float8Tensor
from .stat_registry import WHAT_IF


def what_if_rule(recipe: str, role: str, fmt: FloatFormat | None) -> Rule:
    """The rule by which a recipe (a prefix of stat_registry.WHAT_IF) quantizes 'input', 'weight' or 'grad_output',
    with defaults.

    Args:
        fmt: format of the run's own codes of this tensor; kept, as in Transformer Engine, so a what-if
            changes only the scales. None, if the run has none: the recipe's own. So too where either is NVFP4.
    """
    rule: Rule | None = RECIPES[WHAT_IF[recipe]]().rule(role)
    assert rule is not None
    if fmt is None or E2M1 in (fmt, rule.fmt):
        return replace(rule, stochastic=False)
    return replace(rule, fmt=fmt)


def what_if(
    x: torch.Tensor,
    recipe: str,
    role: str,
    *,
    fmt: FloatFormat | None = None,
    direction: Direction = "rowwise",
    scale: torch.Tensor | None = None,
) -> Float8Tensor:
    """x [rows, cols] quantized by another recipe.

    Args:
        recipe, role, fmt: as for ``what_if_rule``.
        direction: the sides to compute.
        scale: float32 [], from ``WhatIfHistory.scale``, for 'fp8_delayed_scaling'; None: current scaling.
    """
    return reference.quantize(
        CastRequest(x.detach(), what_if_rule(recipe, role, fmt), direction, scale)
    ).tensor


class WhatIfHistory:
    """Recent amaxes of several tensors, and the delayed scales computed from them.

    It follows state/arena.py with the defaults of the recipe: a tensor not cast in an iteration keeps its history, an
    infinite amax is ignored, and there is no scale before the first amax.

    Args:
        fmt: format of the tensors' codes.
        count: number of tensors.
    """

    def __init__(self, fmt: FloatFormat, count: int, device: torch.device):
        self.fmt = fmt
        self.rings = AmaxRingBuffer(count, DelayedScaling().amax_history_len, device)
        self.scales = torch.ones(count, dtype=torch.float32, device=device)
        self.warm = [False] * count

    @keep_subnormals
    def update(self, amax: torch.Tensor) -> None:
        """Ends an iteration. Waits for the device as long as some tensor has no scale.

        ``amax``: float32 [count], this iteration's, over all ranks that share a scale; 0 if a tensor was not cast.
        """
        amax = torch.where(amax.isinf(), 0.0, amax)
        was_cast = amax != 0
        self.rings.put(amax)
        self.scales = torch.where(was_cast, compute_scale(self.rings.largest(), self.fmt), self.scales)
        if not all(self.warm):
            self.warm = [before or now for before, now in zip(self.warm, was_cast.tolist(), strict=True)]
        self.rings.roll(was_cast)

    def scale(self, index: int) -> torch.Tensor | None:
        """float32 [], the scale for this iteration's casts of a tensor; None before its first amax."""
        return self.scales[index] if self.warm[index] else None


class Histories:
    """One history per format and arena, updated with the arena's own amaxes, which are reduced over its ranks."""

    def __init__(self, state: Fp8State):
        self._state = state
        self._histories: list[tuple[Arena, torch.Tensor, WhatIfHistory]] = []
        self._known: dict[str, tuple[WhatIfHistory, int]] = {}

    def update(self) -> None:
        """Called at the end of an iteration, after the arenas are updated. Creates histories for new slots."""
        self._take_new()
        for arena, index, history in self._histories:
            history.update(arena.last_amax[index])

    def scale(self, slot: str) -> torch.Tensor | None:
        """The delayed scale for a slot's next cast; None before its first iteration has ended. Synchronises with the
        device."""
        if slot not in self._known:
            return None
        history, index = self._known[slot]
        return history.scale(index)

    def _take_new(self) -> None:
        for arena in self._state.arenas:
            new_slots: dict[str, tuple[FloatFormat, list[int]]] = {}
            for slot in arena.slots:
                if slot.name not in self._known:
                    fmt = E4M3 if slot.fmt is E2M1 else slot.fmt
                    new_slots.setdefault(fmt.name, (fmt, []))[1].append(slot.index)
            for fmt, index in new_slots.values():
                history = WhatIfHistory(fmt, len(index), arena.device)
                self._histories.append(
                    (arena, torch.tensor(index, dtype=torch.int64, device=arena.device), history)
                )
                for place, number in enumerate(index):
                    self._known[arena.slots[number].name] = history, place

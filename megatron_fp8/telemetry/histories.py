"""Amax histories for delayed what-if recipes."""

from __future__ import annotations

import torch

from ..numerics.formats import FloatFormat
from ..state.arena import Arena
from ..state.fp8_state import Fp8State
from .what_if import WhatIfHistory


class Histories:
    """One history per format and arena, updated with the arena's own amaxes, which are reduced over its ranks."""

    def __init__(self, state: Fp8State):
        self._state = state
        self._kept: list[tuple[Arena, torch.Tensor, WhatIfHistory]] = []
        self._known: dict[str, tuple[WhatIfHistory, int]] = {}

    def update(self) -> None:
        """Called at the end of an iteration, after the arenas are updated. Creates histories for new slots."""
        self._take_new()
        for arena, index, history in self._kept:
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
                    new_slots.setdefault(slot.fmt.name, (slot.fmt, []))[1].append(slot.index)
            for fmt, index in new_slots.values():
                history = WhatIfHistory(fmt, len(index), arena.device)
                self._kept.append(
                    (arena, torch.tensor(index, dtype=torch.int64, device=arena.device), history)
                )
                for place, number in enumerate(index):
                    self._known[arena.slots[number].name] = history, place

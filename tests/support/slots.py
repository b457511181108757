"""Slots of an arena, and amaxes put into them."""

from __future__ import annotations

import torch

from megatron_fp8.numerics.formats import FloatFormat
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.arena import Arena, Slot


def observe(slot: Slot, amax: float, nonfinite: int = 0) -> None:
    slot.record(torch.tensor(amax), torch.tensor(nonfinite) if nonfinite else None)


def make_slots(arena: Arena, recipe: DelayedScaling, formats: list[FloatFormat]) -> list[Slot]:
    return [arena.add(recipe, fmt) for fmt in formats]

"""Slots of an arena, and amaxes put into them."""

from __future__ import annotations

import torch

from megatron_fp8.backends import emulated
from megatron_fp8.numerics.formats import FloatFormat
from megatron_fp8.numerics.rule import TENSOR, Rule
from megatron_fp8.quantizer import Quantizer
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.arena import Arena, Slot


def observe(slot: Slot, amax: float | torch.Tensor, nonfinite: int = 0) -> None:
    quantizer = Quantizer(Rule(slot.fmt, TENSOR, delayed=True), slot, emulated)
    quantizer.record(torch.as_tensor(amax), torch.tensor(nonfinite) if nonfinite else None)


def make_slots(arena: Arena, recipe: DelayedScaling, formats: list[FloatFormat]) -> list[Slot]:
    return [arena.add(recipe, fmt) for fmt in formats]

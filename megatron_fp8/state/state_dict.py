"""Saves delayed-scaling state as plain CPU tensors, and loads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from .arena import Slot

SAVED_PARTS = ("scale", "amax_history", "warm")
"""The saved tensors of a slot."""
PREFIX = "fp8_state"
"""The part of a checkpoint key between a linear's name and its slots."""


def is_slot_key(key: str) -> bool:
    """Whether a checkpoint key belongs to FP8 state."""
    return f".{PREFIX}." in key


def must_be_finite(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a checkpoint tensor that must not hold NaN or Inf.

    All of it, except a history's running amax, the first of its entries [..., length]: it may be Inf and never
    becomes a scale.
    """
    return tensor[..., 1:] if is_slot_key(key) and key.endswith(".amax_history") else tensor


def saved_slots(slots: Mapping[str, Slot]) -> dict[str, torch.Tensor]:
    """Returns ``NAME.scale`` (float32 [1]), ``.amax_history`` (float32 [length]), ``.warm`` (uint8 [1]) of each slot."""
    return {
        f"{name}.{part}": tensor.cpu()
        for name, slot in slots.items()
        for part, tensor in slot.arena.saved_slot(slot).items()
    }


def load_slots(slots: Mapping[str, Slot], saved: Mapping[str, torch.Tensor]) -> None:
    """Restores what ``saved_slots`` returned; from a history of another length the latest entries that fit."""
    for name, slot in slots.items():
        slot.arena.load_slot(slot, {part: saved[f"{name}.{part}"] for part in SAVED_PARTS})


def check_saved(expected: Collection[str], saved: Mapping[str, torch.Tensor], remedy: str) -> None:
    """Raises ValueError unless the saved state has exactly these keys, with possible shapes."""
    missing, unknown = sorted(set(expected) - saved.keys()), sorted(saved.keys() - set(expected))
    if missing or unknown:
        raise ValueError(
            f"the saved FP8 state is of another model or recipe: {len(missing)} entries are missing"
            f" ({', '.join(missing[:3])}), {len(unknown)} are unknown ({', '.join(unknown[:3])}). {remedy}, or start with"
            " cold scales by not loading this"
        )
    for key, tensor in saved.items():
        history = key.endswith(".amax_history")
        fits = tensor.ndim == 1 and tensor.numel() > 0 if history else tensor.numel() == 1
        if not fits:
            raise ValueError(f"the saved FP8 state is damaged: {key} has the shape {tuple(tensor.shape)}")

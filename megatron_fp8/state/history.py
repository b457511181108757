"""Amax histories of delayed scaling, for all tensors of one recipe and format."""

from __future__ import annotations

from typing import Any

import torch

from .amax_ring_buffer import AmaxRingBuffer


class History:
    """The histories of all slots that share a delayed recipe and a format, so that updates are vectorised.

    Args:
        length: amax_history_len.

    Attributes (k slots):
        slots: in the order of all that follows; slot.column is its index.
        cold: how many of them have no scale yet.
        index: int64 [k], their indices in the arena.
        rings: their amaxes.
        fp8_max: float32 [k], the largest magnitude of their format.
    """

    def __init__(self, length: int, device: torch.device):
        self.slots: list[Any] = []  # of arena.Slot; arena.py imports this file
        self.cold = 0
        self.index = torch.zeros(0, dtype=torch.int64, device=device)
        self.rings = AmaxRingBuffer(0, length, device)
        self.fp8_max = torch.zeros(0, device=device, dtype=torch.float32)

    def add(self, slot: Any) -> None:
        """Adds a cold slot; ``grow`` allocates its history."""
        slot.column = len(self.slots)
        self.slots.append(slot)
        self.cold += 1

    @torch.inference_mode(False)
    def grow(self) -> None:
        """Allocates empty histories for the slots added since the last call."""
        count = len(self.slots)
        if self.rings.count == count:
            return
        device = self.index.device
        self.rings = self.rings.grown(count)
        self.index = torch.tensor([s.index for s in self.slots], device=device, dtype=torch.int64)
        self.fp8_max = torch.tensor([s.fmt.max for s in self.slots], device=device, dtype=torch.float32)

    def warm_up(self, seen: torch.Tensor) -> None:
        """Marks slots with a first scale as warm. ``seen`` (bool [k]) goes to the host only while any slot is cold."""
        if not self.cold:
            return
        for slot, was_seen in zip(self.slots, seen.tolist(), strict=True):
            slot.warm |= was_seen
        self.cold = sum(not slot.warm for slot in self.slots)

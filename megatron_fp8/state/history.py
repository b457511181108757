"""Histories of delayed scaling: the latest amaxes of every tensor that shares a recipe and a format, in one matrix."""

from __future__ import annotations

from typing import Any

import torch


class History:
    """The histories of all slots that share a delayed recipe and a format: one matrix, so that updates are vectorised.

    A slot's history is its row of ``rows``, used as a ring that starts at its entry of ``head``: to roll is to move the
    head, and no history is copied. Every slot has a head of its own, since one that was not cast does not roll.

    Attributes (k slots):
        slots: in the order of all that follows; slot.column is its place in it.
        cold: how many of them have no scale yet.
        index: int64 [k], their places in the arena.
        head: int64 [k], where each ring starts: the running entry, zero between iterations.
        rows: float32 [k, amax_history_len].
        fp8_max: float32 [k], the largest magnitude of their format.
    """

    def __init__(self, device: torch.device):
        self.slots: list[Any] = []  # of Slot, which arena.py has: it imports this file
        self.cold = 0
        self.index = torch.zeros(0, dtype=torch.int64, device=device)
        self.head = torch.zeros(0, dtype=torch.int64, device=device)
        self.rows = torch.zeros(0, 0, device=device, dtype=torch.float32)
        self.fp8_max = torch.zeros(0, device=device, dtype=torch.float32)

    def add(self, slot: Any) -> None:
        """One more slot, cold; its history is made by ``grow``."""
        slot.column = len(self.slots)
        self.slots.append(slot)
        self.cold += 1

    @torch.inference_mode(False)
    def grow(self) -> None:
        """Take in the slots that were added since, with empty histories."""
        have, want = self.index.numel(), len(self.slots)
        if have == want:
            return
        delayed, device = self.slots[0].delayed, self.index.device
        assert delayed is not None
        rows = torch.zeros(want, delayed.amax_history_len, device=device, dtype=torch.float32)
        rows[:have] = self.rows if have else rows[:0]
        self.rows = rows
        self.head = torch.cat([self.head, self.head.new_zeros(want - have)])
        self.index = torch.tensor([s.index for s in self.slots], device=device, dtype=torch.int64)
        self.fp8_max = torch.tensor([s.fmt.max for s in self.slots], device=device, dtype=torch.float32)

    def put(self, value: torch.Tensor) -> None:
        """Write the running entry of every slot: value float32 [k]."""
        self.rows.scatter_(1, self.head[:, None], value[:, None])

    def roll(self, seen: torch.Tensor) -> None:
        """Where seen (bool [k]), the running entry becomes the latest and the oldest falls out. Every running entry is
        zero after it."""
        self.head.add_(seen).remainder_(self.rows.shape[1])
        self.put(torch.zeros_like(self.index, dtype=torch.float32))

    def unrolled(self) -> torch.Tensor:
        """float32 [amax_history_len, k], the running entry first."""
        length = self.rows.shape[1]
        steps = torch.arange(length, device=self.head.device, dtype=torch.int64)
        order = (self.head[:, None] + steps) % length  # [k, length]
        return self.rows.gather(1, order).t()

    def warm_up(self, seen: torch.Tensor) -> None:
        """Slots that just got their first scale leave the cold start; the mask is read back only while any is cold."""
        if not self.cold:
            return
        for slot, was_seen in zip(self.slots, seen.tolist(), strict=True):
            slot.warm |= was_seen
        self.cold = sum(not slot.warm for slot in self.slots)

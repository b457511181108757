"""Histories of delayed scaling: the latest amaxes of every tensor that shares a recipe and a format, in one matrix."""

from __future__ import annotations

from typing import Any

import torch


class History:
    """The histories of all slots that share a delayed recipe and a format: one matrix, so that updates are vectorised.

    Slot i's history is row i of ``rows`` [slots, amax_history_len], used as a ring that starts at ``head[i]``: to roll
    is to move the head, and no history is copied. Every slot has a head of its own, since one that was not cast does
    not roll.
    """

    def __init__(self, device: torch.device):
        self.slots: list[Any] = []  # state.Slot
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
        """Write the running entry of every slot."""
        self.rows.scatter_(1, self.head[:, None], value[:, None])

    def roll(self, seen: torch.Tensor) -> None:
        """Where seen, the running entry becomes the latest and the oldest falls out; the running one is zero again."""
        self.head.add_(seen).remainder_(self.rows.shape[1])
        self.put(torch.zeros_like(self.index, dtype=torch.float32))

    def unrolled(self) -> torch.Tensor:
        """[amax_history_len, slots], the running entry first."""
        length = self.rows.shape[1]
        order = (
            self.head[:, None] + torch.arange(length, device=self.head.device, dtype=torch.int64)
        ) % length
        return self.rows.gather(1, order).t()

    def warm_up(self, seen: torch.Tensor) -> None:
        """Slots that just got their first scale leave the cold start; the mask is read back only while any is cold."""
        if not self.cold:
            return
        for slot, was_seen in zip(self.slots, seen.tolist(), strict=True):
            slot.warm |= was_seen
        self.cold = sum(not slot.warm for slot in self.slots)

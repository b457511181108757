"""Amax histories of delayed scaling: ring buffers whose maxima are updated incrementally."""

from __future__ import annotations

from typing import Any

import torch

TOGETHER = 4096
"""Number of rings whose blocks are read at once, so that the copy stays in a core's cache."""


class AmaxRingBuffer:
    """The histories of k tensors, a ring of ``length`` amaxes each. Rolling moves the head and copies nothing.

    Every ring has its own head, since the history of a tensor that was not cast does not roll. A ring is stored in
    blocks of about sqrt(length) entries with their maxima, so the largest of 1,024 is found from 64 numbers. An
    iteration writes one entry, and reads one block and the maxima of the others.

    Attributes:
        length: entries of a ring, with the running one.
        block: entries of a block, a power of two.
        head: int64 [k], the index of the running entry, whose content is undefined until it is written.
        rows: float32 [blocks, k, block], 0 beyond ``length``. Most heads are equal, so an iteration's writes are
            close together.
        maxima: float32 [blocks, k], always equal to ``rows.amax(2)``. Derived: not in checkpoints.
    """

    def __init__(self, count: int, length: int, device: torch.device):
        self.length = length
        self._shift = ((length - 1).bit_length() + 1) // 2
        self.block = 1 << self._shift
        blocks = -(-length // self.block)
        self.head = torch.zeros(count, dtype=torch.int64, device=device)
        self.rows = torch.zeros(blocks, count, self.block, dtype=torch.float32, device=device)
        self.maxima = torch.zeros(blocks, count, dtype=torch.float32, device=device)
        self._number = torch.arange(count, dtype=torch.int64, device=device)
        self._steps = torch.arange(length, dtype=torch.int64, device=device)

    @property
    def count(self) -> int:
        """The number of rings, k."""
        return self.head.numel()

    def grown(self, count: int) -> AmaxRingBuffer:
        """Returns a copy with additional empty rings at the end, ``count`` in all."""
        more = AmaxRingBuffer(count, self.length, self.head.device)
        more.head[: self.count] = self.head
        more.rows[:, : self.count] = self.rows
        more.maxima[:, : self.count] = self.maxima
        return more

    def put(self, value: torch.Tensor) -> None:
        """Writes the running entry of every ring: value float32 [k]. No host sync; the memory stays the same."""
        touched = torch.add(self._number, self.head >> self._shift, alpha=self.count)  # [k], among all blocks
        place = torch.add(self.head & (self.block - 1), touched, alpha=self.block)
        self.rows.view(-1).scatter_(0, place, value)
        blocks = self.rows.view(-1, self.block)
        found = [blocks.index_select(0, some).amax(1) for some in touched.split(TOGETHER)]
        self.maxima.view(-1).scatter_(0, touched, torch.cat(found))

    def largest(self) -> torch.Tensor:
        """Returns float32 [k], the largest entry of each ring."""
        return self.maxima.amax(0)

    def roll(self, which: torch.Tensor) -> None:
        """Advances heads where which (bool [k]): the running entry becomes the latest; ``put`` overwrites the oldest."""
        self.head.add_(which).masked_fill_(self.head == self.length, 0)

    def unrolled(self) -> torch.Tensor:
        """Returns float32 [length, k]: row 0 is the running entry, as 0; then the oldest entry to the latest."""
        order = (self.head[:, None] + self._steps) % self.length  # [k, length]
        entries = self.rows.transpose(0, 1).reshape(self.count, -1).gather(1, order).t()
        entries[0] = 0
        return entries

    def entries(self, ring: int) -> torch.Tensor:
        """Returns float32 [length], one ring's column of ``unrolled``. A copy; no host sync."""
        entries = self.rows[:, ring].flatten()[(self.head[ring] + self._steps) % self.length]
        entries[0] = 0
        return entries

    def load(self, ring: int, entries: torch.Tensor) -> None:
        """Restores what ``entries`` returned; from a ring of another length the latest entries that fit."""
        count = min(self.length, len(entries)) - 1
        blocks = self.rows[:, ring]
        fresh = torch.zeros_like(blocks).view(-1)
        fresh[self.length - count : self.length] = entries[len(entries) - count :]
        blocks.copy_(fresh.view_as(blocks))
        self.maxima[:, ring] = blocks.amax(1)
        self.head[ring] = 0

    def damaged(self) -> torch.Tensor:
        """Returns bool [], whether memory holds impossible values: NaN, Inf, or a maximum that is not its block's."""
        # A negative entry is no block's maximum, and changes no scale.
        return ~(self.rows.amax(2).eq(self.maxima) & self.maxima.isfinite()).all()


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

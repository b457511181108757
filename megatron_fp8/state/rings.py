"""Ring buffers of amaxes, and their maxima, updated incrementally."""

from __future__ import annotations

import torch

TOGETHER = 4096
"""So many rings' blocks are read at once, so that a copy of them stays in a core's cache."""


class Rings:
    """The histories of k tensors, a ring of ``length`` amaxes each: to roll is to move its head, and nothing is copied.

    Every ring has a head of its own, since the history of a tensor that was not cast does not roll. The largest of 1,024
    is found from 64 numbers: a ring lies in blocks of about sqrt(length) entries, whose maxima are kept. An iteration
    writes one entry, so that one block is read, and the maxima of the others.

    Attributes:
        length: entries of a ring, the running one included.
        block: entries of a block, a power of two.
        head: int64 [k], the running entry; what it holds is of no iteration until it is written.
        rows: float32 [blocks, k, block], 0 beyond ``length``. Most heads are equal: what they write lies together.
        maxima: float32 [blocks, k], at any time ``rows.amax(2)``. Derived: no checkpoint has it.
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
        """k."""
        return self.head.numel()

    def grown(self, count: int) -> Rings:
        """These rings and empty ones behind them, ``count`` in all, in other memory."""
        more = Rings(count, self.length, self.head.device)
        more.head[: self.count] = self.head
        more.rows[:, : self.count] = self.rows
        more.maxima[:, : self.count] = self.maxima
        return more

    def put(self, value: torch.Tensor) -> None:
        """Write the running entry of every ring: value float32 [k]. Nothing waits for a GPU, and nothing moves."""
        touched = torch.add(self._number, self.head >> self._shift, alpha=self.count)  # [k], among all blocks
        place = torch.add(self.head & (self.block - 1), touched, alpha=self.block)
        self.rows.view(-1).scatter_(0, place, value)
        blocks = self.rows.view(-1, self.block)
        found = [blocks.index_select(0, some).amax(1) for some in touched.split(TOGETHER)]
        self.maxima.view(-1).scatter_(0, touched, torch.cat(found))

    def largest(self) -> torch.Tensor:
        """float32 [k], of all entries of each ring."""
        return self.maxima.amax(0)

    def roll(self, which: torch.Tensor) -> None:
        """Where which (bool [k]), the running entry becomes the latest; the oldest falls out in the next ``put``."""
        self.head.add_(which).masked_fill_(self.head == self.length, 0)

    def unrolled(self) -> torch.Tensor:
        """float32 [length, k], the oldest entry second and the latest last; the running entry, which is first, as 0."""
        order = (self.head[:, None] + self._steps) % self.length  # [k, length]
        entries = self.rows.transpose(0, 1).reshape(self.count, -1).gather(1, order).t()
        entries[0] = 0
        return entries

    def entries(self, ring: int) -> torch.Tensor:
        """float32 [length], as ``unrolled`` has them of one ring. A copy; nothing is read back."""
        entries = self.rows[:, ring].flatten()[(self.head[ring] + self._steps) % self.length]
        entries[0] = 0
        return entries

    def load(self, ring: int, entries: torch.Tensor) -> None:
        """Put back what ``entries`` gave; of a ring of another length the latest that fit."""
        kept = min(self.length, len(entries)) - 1
        blocks = self.rows[:, ring]
        fresh = torch.zeros_like(blocks).view(-1)
        fresh[self.length - kept : self.length] = entries[len(entries) - kept :]
        blocks.copy_(fresh.view_as(blocks))
        self.maxima[:, ring] = blocks.amax(1)
        self.head[ring] = 0

    def damaged(self) -> torch.Tensor:
        """bool []: whether memory holds what nobody wrote: NaN, Inf, a maximum that is not its block's."""
        # What is below 0 is no block's maximum, and changes no scale.
        return ~(self.rows.amax(2).eq(self.maxima) & self.maxima.isfinite()).all()

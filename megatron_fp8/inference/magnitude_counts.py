"""Counts of a tensor's magnitudes, with exact percentiles.

No value is stored: a bfloat16 magnitude has 15 bits, so 32,640 counters give the percentiles of all batches. float32
values are rounded to bfloat16 for counting only.

Rejected: histograms, whose range must be guessed from the first batch or changed later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ..state.collectives import device_of, equal_on_ranks

_MAGNITUDES = 0x7F80  # number of finite bfloat16 magnitudes: bit patterns 0 to 0x7F7F


@dataclass
class MagnitudeCounts:
    """Statistics of one linear's input.

    Attributes:
        amaxes: the largest finite magnitude of each batch, as floats.
        counts: int64 [32640], number of finite values per bfloat16 magnitude.
        nonfinite: number of NaN and Inf; excluded from the other two.
    """

    amaxes: list[float] = field(default_factory=list)
    counts: torch.Tensor = field(
        default_factory=lambda: torch.zeros(_MAGNITUDES, dtype=torch.int64, device="cpu")
    )
    nonfinite: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Count the elements of x (any shape, any floating dtype)."""
        x = x.detach().reshape(-1)
        finite = x[x.isfinite()]
        self.nonfinite += x.numel() - finite.numel()
        magnitudes = finite.abs()
        self.amaxes.append(float(magnitudes.amax()) if finite.numel() else 0.0)
        bits = magnitudes.to(torch.bfloat16).view(torch.int16).to(torch.int64)  # [finite values], indices
        # float32 values just below bfloat16's limit round to Inf.
        counts = torch.bincount(bits.clamp_(max=_MAGNITUDES - 1), minlength=_MAGNITUDES)
        self.counts += counts.cpu()

    def percentile(self, percent: float) -> float:
        """The smallest bfloat16 magnitude that at least ``percent`` % of the values do not exceed; 0 without values."""
        total = int(self.counts.sum())
        if not total:
            return 0.0
        reached = self.counts.cumsum(0) >= math.ceil(total * percent / 100)
        index = int(reached.to(torch.int8).argmax())
        return float(torch.tensor(index, dtype=torch.int16, device="cpu").view(torch.bfloat16))

    def above(self, magnitude: float) -> float:
        """Fraction of the values above a magnitude, to bfloat16 precision."""
        total = int(self.counts.sum())
        bits = int(torch.tensor(magnitude, dtype=torch.bfloat16, device="cpu").view(torch.int16))
        return float(self.counts[bits + 1 :].sum()) / total if total else 0.0


def merge_ranks(seen: MagnitudeCounts, group: Any) -> MagnitudeCounts:
    """Merges the statistics of all ranks of a group."""
    if group is None or dist.get_world_size(group) == 1:
        return seen
    if not equal_on_ranks([len(seen.amaxes)], group):
        raise ValueError(
            f"this rank calibrated on {len(seen.amaxes)} batches, and another one on fewer or more"
        )
    device = device_of(group)
    amaxes = torch.tensor(seen.amaxes, dtype=torch.float64, device=device)
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    counts = torch.cat([seen.counts, seen.counts.new_tensor([seen.nonfinite])]).to(device)
    dist.all_reduce(counts, op=dist.ReduceOp.SUM, group=group)
    return MagnitudeCounts(amaxes.tolist(), counts[:-1].cpu(), int(counts[-1]))

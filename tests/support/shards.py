"""Tensor-parallel shards of one linear layer, and what their ranks send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fp8.linear.tensor_parallel import TensorParallel
from tests.support.sites import randn

M, K, N, BATCH = 256, 64, 96, 2


@dataclass
class Shards:
    """The whole problem, and each rank's part of it as a layout cuts it."""

    layout: str
    x: torch.Tensor  # [m, K]
    w: torch.Tensor
    dy: torch.Tensor

    @staticmethod
    def make(layout: str, m: int = M, k: int = K, n: int = N) -> Shards:
        return Shards(layout, randn(m, k, seed=1), randn(n, k, seed=2) / 4, randn(m, n, seed=3))

    def of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x, w, dy) that the rank's layer is given, before the sequence is cut."""
        if self.layout.startswith("column"):
            return self.x, self.w.chunk(2)[rank], self.dy.chunk(2, 1)[rank]
        return self.x.chunk(2, 1)[rank], self.w.chunk(2, 1)[rank], self.dy

    def tokens(self, t: torch.Tensor, rank: int, side: str) -> torch.Tensor:
        """The rank's tokens of its x or dy, as [sequence, batch, features]."""
        cut = {"column+SP": "x", "row+SP": "dy"}.get(self.layout) == side
        return (t.chunk(2)[rank] if cut else t).unflatten(0, (-1, BATCH))


def communication(layout: str) -> TensorParallel:
    kind: Any = layout.partition("+")[0]
    sequence = layout.endswith("SP")
    return TensorParallel.of(
        kind, dist.group.WORLD, sequence_parallel=sequence, reduce_dgrad=kind == "column" and not sequence
    )

"""The delayed update in one launch against state.Arena's torch operations: scales, histories, heads, who was seen."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels.delayed_update import update_delayed
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.amax_history import AmaxRingBuffer
from megatron_fp8.state.arena import Arena
from tests.support.matrices import DEVICE


class Updated:
    """The same slots as an arena's, updated by the kernel: both formats in one launch."""

    def __init__(self, slots: int, length: int):
        self.scale = torch.ones(slots, device=DEVICE)
        self.rings = AmaxRingBuffer(slots, length, DEVICE)
        formats = torch.tensor([(E4M3, E5M2)[i % 2].max for i in range(slots)], device=DEVICE)
        # Rows of the kernel's matrices need not be in the arena's order.
        self.index = torch.randperm(slots, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        self.fp8_max = formats[self.index]

    def update(self, running: torch.Tensor, recipe: DelayedScaling, iteration: int) -> torch.Tensor:
        return update_delayed(
            running,
            self.scale,
            self.index,
            self.rings.head,
            self.rings.rows,
            self.rings.maxima,
            self.fp8_max,
            length=self.rings.length,
            margin=recipe.margin,
            epsilon=recipe.amax_epsilon,
            most_recent=recipe.amax_compute_algo == "most_recent",
            due=iteration % recipe.interval == 0,
        )

    def unrolled(self, slot: int) -> torch.Tensor:
        return self.rings.entries(int((self.index == slot).nonzero()))


@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
        DelayedScaling(amax_history_len=1),
        DelayedScaling(amax_history_len=5, margin=2),
        DelayedScaling(amax_history_len=200, amax_epsilon=1e-3),
        DelayedScaling(amax_history_len=4, interval=3, amax_compute_algo="most_recent"),
    ],
    ids=["1-most-recent", "1", "5-margin", "200-epsilon", "4-interval"],
)
def test_update(recipe):
    slots = 21
    arena = Arena(None, DEVICE)
    for i in range(slots):
        arena.add(recipe, (E4M3, E5M2)[i % 2])
    mine = Updated(slots, recipe.amax_history_len)
    generator = torch.Generator().manual_seed(0)
    for iteration in range(9):
        running = torch.rand(slots, generator=generator).to(DEVICE) * 10.0 ** (iteration - 4)
        running[torch.rand(slots, generator=generator) < 0.2] = 0  # not cast
        running[torch.rand(slots, generator=generator) < 0.1] = float("inf")
        running[iteration] = 2.0**-149
        arena.rows[0, :slots] = running
        before = running.clone()
        seen = mine.update(running, recipe, iteration)
        arena.update(iteration)
        assert_same_bytes(running, before, "the running row is not the kernel's to clear")
        assert_same_bytes(mine.scale, arena.scale, f"scales of iteration {iteration}")
        assert not mine.rings.damaged()
        assert torch.equal(seen, ((running > 0) & running.isfinite())[mine.index])
        for fmt in (E4M3, E5M2):
            index, rows = arena.history(recipe, fmt)
            for i, slot in enumerate(index.tolist()):
                assert_same_bytes(mine.unrolled(slot), rows[:, i], f"history {slot}, iteration {iteration}")


def test_no_slots():
    assert Updated(0, 4).update(torch.zeros(0, device=DEVICE), DelayedScaling(), 0).numel() == 0

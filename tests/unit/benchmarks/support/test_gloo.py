"""Groups of gloo in a rank share a device."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.support.ranks import RankPool


def summed_in_three_groups() -> tuple[float, int]:
    """A rank case: what is added up in one group after the other, and how many threads look at sockets."""
    value = torch.ones((), dtype=torch.float32, device="cpu")
    for group in [dist.new_group([0, 1]) for _ in range(3)]:
        dist.all_reduce(value, group=group)
    threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return float(value), threads.count("gloo_tcp_loop")


def test_one_thread_serves_all_groups(ranks: RankPool) -> None:
    assert ranks(2).run(summed_in_three_groups) == [(8.0, 1)] * 2

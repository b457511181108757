"""The gather of codes among processes: everybody gets everybody's, and it is timed only then."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.ranks import RankPool
from megatron_fp8.backends import emulated
from megatron_fp8.plan.size_table import Gemm
from megatron_fp8.recipe import RECIPES
from megatron_fp8.study.bench_collectives import collectives, measure
from megatron_fp8.study.bench_linear import Bench

SHAPE = Gemm(64, 8, 10)


def measured(name: str, spoilt: bool) -> dict:
    """A rank case. Spoilt: rank 1 sends other codes than its own."""
    gather = dist.all_gather_into_tensor

    def wrong(out, x):
        gather(out, x + 1 if dist.get_rank() == 1 and x.dtype == torch.uint8 else x)

    with pytest.MonkeyPatch.context() as patch:
        if spoilt:
            patch.setattr(dist, "all_gather_into_tensor", wrong)
        return measure(dist.get_rank(), 2, torch.device("cpu"), SHAPE, RECIPES[name](), emulated, 4)


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_what_is_gathered_is_what_was_sent(ranks: RankPool, name):
    for found in ranks(2).run(measured, name, False):
        assert found["right"] and len(found["fp8"]) == len(found["bf16"]) == 4


def test_what_is_gathered_wrongly_is_seen_by_all(ranks: RankPool):
    assert [found["right"] for found in ranks(2).run(measured, "rowwise", True)] == [False, False]


@pytest.mark.long
def test_processes_of_its_own_are_started():
    bench = Bench(torch.device("cpu"), 4)
    collectives(bench, SHAPE, RECIPES["tensorwise"](), emulated)
    assert [row["section"] for row in bench.rows] == ["collectives"] and not bench.wrong

"""Differences between Megatron-Core set-ups: the groups that it has no getter for."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core.parallel_state import RankGenerator

from megatron_fp8.mcore import environment
from megatron_fp8.mcore.environment import product_ranks


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("etp, ep, edp, pp", [(2, 1, 2, 1), (2, 2, 2, 2), (4, 2, 3, 1), (2, 3, 4, 2)])
def test_the_ranks_that_hold_parts_of_the_same_experts(etp, ep, edp, pp, order):
    """Expert TP x expert DP, as Megatron-Core's own generator would make them."""
    experts = RankGenerator(etp, ep, edp, pp, 1, order)
    expected = {rank: sorted(group) for group in experts.get_ranks("tp-dp") for rank in group}
    tensor, data = (
        {rank: group for group in experts.get_ranks(kind) for rank in group} for kind in ("tp", "dp")
    )
    assert {rank: product_ranks(tensor[rank], data[rank], rank) for rank in expected} == expected
    assert len(expected) == etp * ep * edp * pp


def product_of_two():
    """A rank case: the ranks of the group over two groups of two, and its timeout in seconds."""
    rank, limit = dist.get_rank(), timedelta(minutes=7)
    tensor = [dist.new_group(pair, timeout=limit) for pair in ((0, 1), (2, 3))][rank // 2]
    data = [dist.new_group(pair, timeout=limit) for pair in ((0, 2), (1, 3))][rank % 2]
    found = environment._product(tensor, data)
    options = found._get_backend(torch.device("cpu")).options
    return dist.get_process_group_ranks(found), options._timeout.total_seconds()


def test_a_group_over_two_waits_as_long_as_they_do(ranks):
    assert ranks(4).run(product_of_two) == [([0, 1, 2, 3], 420)] * 4

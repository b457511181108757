"""Differences between Megatron-Core set-ups: the groups that it has no getter for."""

from __future__ import annotations

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_fp8.mcore.installed import product_ranks


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

"""In an iteration's first microbatch wgrad is written to Megatron's gradient buffers, in later ones it is added."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.support.ranks import Layout, RankPool
from tests.support.native_gpt import wgrads

EXPERTS = {
    "num_moe_experts": 2,
    "moe_grouped_gemm": True,
    "moe_router_topk": 2,
    "bias_activation_fusion": False,
}


@pytest.mark.parametrize(
    ("recipe", "fields"), [("mxfp8", {}), ("delayed", {}), ("mxfp8", {"fp8_param": True})], ids=str
)
def test_the_first_microbatch_overwrites_zeros(ranks: RankPool, recipe: str, fields: dict[str, Any]) -> None:
    """Four linears: 4 of the 24 products of two microbatches are written to main_grad, with all bits of a sum."""
    into, others, digests = ranks(Layout().model_ranks).run(wgrads, recipe, fields, True, timeout=300)[0]
    assert into == [4, 4] and others[1] == 20  # the first step has tried products, too
    none, all_added, expected = ranks(Layout().model_ranks).run(wgrads, recipe, fields, False, timeout=300)[0]
    assert none == [0, 0] and all_added[1] == 24
    assert digests == expected


def test_experts_of_the_first_microbatch_overwrite_zeros(ranks: RankPool) -> None:
    into, _, digests = ranks(Layout().model_ranks).run(wgrads, "mxfp8", EXPERTS, True, timeout=300)[0]
    fewer, _, expected = ranks(Layout().model_ranks).run(wgrads, "mxfp8", EXPERTS, False, timeout=300)[0]
    assert [a - b for a, b in zip(into, fewer, strict=True)] == [6, 6]  # two of attention, two of each expert
    assert digests == expected

"""Ranks of a layout, counted by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_fp8.train.config.ranks import dense_ranks, expert_ranks, expert_tensor_ranks, least_ranks


@pytest.mark.parametrize(
    "tp, pp, cp, ep, etp, experts, counted",
    [
        (1, 1, 1, 1, None, None, (1, 1, 1, 1)),
        (4, 2, 3, 1, None, None, (24, 1, 4, 24)),
        (2, 1, 1, 2, None, 8, (2, 4, 2, 4)),  # experts are cut as dense layers are
        (2, 1, 1, 2, 1, 8, (2, 2, 1, 2)),
        (3, 1, 1, 2, 1, 8, (3, 2, 1, 6)),  # neither divides the other
        (2, 2, 2, 4, 1, 8, (8, 8, 1, 8)),
    ],
)
def test_ranks_of_a_layout(
    tp: int, pp: int, cp: int, ep: int, etp: int | None, experts: int | None, counted: tuple[int, ...]
) -> None:
    model = SimpleNamespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        num_moe_experts=experts,
    )
    found = tuple(count(model) for count in (dense_ranks, expert_ranks, expert_tensor_ranks, least_ranks))
    assert found == counted

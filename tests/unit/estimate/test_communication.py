"""What a rank exchanges: groups of different sizes are different lines; what a collective costs a rank; small
all-reduces by layout, which trainings and simulated worlds hold (test_scaling.py)."""

from __future__ import annotations

import pytest

from megatron_fp8.estimate.communication import stage_traffic, status_allreduces
from megatron_fp8.estimate.config_reader import Settings, read
from megatron_fp8.estimate.linear_communication import Traffic


def test_dense_layers_and_experts_have_amax_groups_of_their_own_sizes():
    settings = read(["--config=deepseek_v3"], gpus=2048)
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == 1]
    found = {one.ranks: one.calls for one in stage_traffic(settings, chunks) if one.axis == "amax"}
    assert found == {128: 1, 2: 1}


def test_a_ring_sends_a_part_to_each_step():
    """Twice for an all-reduce; over a thousand ranks bytes hardly grow, and messages do."""
    for ranks in (2, 1024):
        gather = Traffic("x", "all-gather", "data", ranks, 1024, calls=3)
        assert (gather.sent, gather.messages) == (1024 - 1024 // ranks, 3 * (ranks - 1))
        reduced = Traffic("x", "all-reduce", "data", ranks, 1024, calls=3)
        assert (reduced.sent, reduced.messages) == (2 * gather.sent, 2 * gather.messages)
    assert Traffic("x", "send", "pipeline", 2, 1024, calls=3).messages == 3


TINY = "--config=tiny_gpt_cpu"


def asked(settings: Settings, stage: int = 0) -> list[tuple[int, int]]:
    """(ranks, bytes) of each."""
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == stage]
    return [(one.ranks, one.bytes) for one in status_allreduces(settings, chunks)]


def layout(gpus: int, sharded: bool, **model: object) -> Settings:
    sizes = {"tensor_model_parallel_size": 1, "sequence_parallel": False, **model}
    options = [f"--model.{name}={str(value).lower()}" for name, value in sizes.items()]
    shards = f"--optimizer.use_distributed_optimizer={str(sharded).lower()}"
    return read([TINY, shards, "--train.global_batch_size=64", *options], gpus=gpus)


def test_one_rank_asks_nobody() -> None:
    assert asked(layout(1, sharded=True)) == []


@pytest.mark.parametrize("sharded", [False, True])
def test_an_optimizer_asks_the_ranks_that_hold_its_model(sharded: bool) -> None:
    """All of them where it is sharded, and the norm in float64; else those that split the model."""
    found = asked(layout(8, sharded, tensor_model_parallel_size=2, sequence_parallel=True))
    assert found == ([(8, 4), (8, 4), (8, 8)] if sharded else [(8, 4), (2, 4), (2, 4)])


def test_stages_ask_what_casts_met_elsewhere() -> None:
    more = set(asked(layout(8, True, pipeline_model_parallel_size=2))) - set(asked(layout(8, True)))
    assert more == set()  # of the same kind as the norm
    assert len(asked(layout(8, True, pipeline_model_parallel_size=2))) == 4
    assert len(asked(layout(8, True, pipeline_model_parallel_size=2, fp8="null"))) == 3


def test_a_stage_without_experts_has_one_optimizer() -> None:
    settings = read(["--config=deepseek_v3", "--train.global_batch_size=2048"], gpus=2048)
    assert len(asked(settings, stage=1)) == 5

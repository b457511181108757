"""How many small all-reduces a step takes, by layout; trainings and simulated worlds hold them (test_scaling.py)."""

from __future__ import annotations

import pytest

from megatron_fp8.estimate.settings import Settings, read
from megatron_fp8.estimate.status_allreduce import of_step

TINY = "--config=tiny_gpt_cpu"


def asked(settings: Settings, stage: int = 0) -> list[tuple[int, int]]:
    """(ranks, bytes) of each."""
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == stage]
    return [(one.ranks, one.bytes) for one in of_step(settings, chunks)]


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

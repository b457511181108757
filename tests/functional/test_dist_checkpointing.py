"""Megatron-Core's own dist_checkpointing, as a training loop of one's own calls it."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support.fp8_gpt import NARROW
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.resume import Training

HISTORY: dict[str, Any] = {**NARROW, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}


def saves(state: dict[str, Any], folder: str) -> None:
    """dist_checkpointing.save in a rank of a pool."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Its writer starts processes, which ranks of a pool may not.
    with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):
        dist_checkpointing.save(state, folder)
    # Dropped, its queue ends the process that holds it, which would outlive these ranks.
    filesystem_async._results_queue = None


def test_megatrons_own_save_and_load_of_a_sharded_optimizer(ranks, tmp_path):
    """In its default way, which fails without this package. A loop of one's own goes on with the same bits."""
    for straight, again in ranks(2).run(megatron_saves, str(tmp_path)):
        assert again == straight


def megatron_saves(folder: str) -> list[list[tuple[float, float]]]:
    """Losses and norms of two iterations after a save: of the model that saved, and of those that loaded."""
    with model_parallel():
        from megatron.core import dist_checkpointing

        from megatron_fp8.mcore.runtime import unwrap

        def state(training: Training, loading: bool) -> dict[str, Any]:
            whole = unwrap(training.chunks[0]).sharded_state_dict()
            model = {name: shard for name, shard in whole.items() if not name.endswith("_extra_state")}
            metadata = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
            return {
                "model": model,
                "optimizer": training.optimizer.sharded_state_dict(model, loading, metadata=metadata),
            }

        # Widths that leave padding in all of several buckets.
        fields = {"hidden_size": 160, "ffn_hidden_size": 272, "num_layers": 1}
        ddp = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 10_000}
        trainings = [Training(Layout(), "tensorwise", fields, ddp, seed) for seed in (1, 2)]
        first, other = trainings
        first.steps(1)
        saves(state(first, False), folder)
        loaded = dist_checkpointing.load(state(other, True), folder)
        unwrap(other.chunks[0]).load_state_dict(loaded["model"])
        other.optimizer.load_state_dict(loaded["optimizer"])
        other.iteration = first.iteration
        return [training.steps(2) for training in trainings]


def test_megatrons_own_load_before_a_models_first_forward(ranks, tmp_path):
    """Histories come with the weights, also into a model that has not run; a BF16 checkpoint has none and says so."""
    results = ranks(2).run(megatron_loads_histories, str(tmp_path))
    for straight, again, from_bf16, _ in results:
        assert again == straight and from_bf16[0][0] == pytest.approx(straight[0][0], rel=0.2)
    said = [result[-1] for result in results]
    lacks = "bf16 has no delayed scaling's state of 24 tensors of the first rank: their scales start from their own amax"
    assert said[0].count("has no delayed scaling's state") == 1 and lacks in said[0] and not said[1]


def megatron_loads_histories(folder: str) -> tuple[Any, ...]:
    """(loss, norm) of an iteration of the model that saved, of one that loaded it, and of one from BF16; the lines."""
    layout, said = Layout(tp=2), io.StringIO()
    with model_parallel(layout), contextlib.redirect_stderr(said):
        from megatron.core import dist_checkpointing

        from megatron_fp8.mcore.runtime import unwrap

        def state(training: Training) -> dict[str, Any]:
            whole = unwrap(training.chunks[0]).sharded_state_dict()
            return {"model": {k: shard for k, shard in whole.items() if not k.endswith("_extra_state")}}

        def model(recipe: str | None, seed: int) -> Training:
            return Training(layout, recipe, HISTORY if recipe else NARROW, {}, seed)

        sources = {"delayed": model("delayed", 1), "bf16": model(None, 1)}
        targets = {name: model("delayed", 2) for name in sources}
        for name, source in sources.items():
            source.steps(2)
            path = Path(folder) / name
            if torch.distributed.get_rank() == 0:
                path.mkdir()
            torch.distributed.barrier()
            saves(state(source), str(path))
            unwrap(targets[name].chunks[0]).load_state_dict(
                dist_checkpointing.load(state(targets[name]), str(path))["model"]
            )
            targets[name].iteration = source.iteration
        steps = [training.steps(1) for training in (sources["delayed"], *targets.values())]
    lines = [line for line in said.getvalue().splitlines() if line.startswith("megatron_fp8: /")]
    return *steps, "\n".join(lines)

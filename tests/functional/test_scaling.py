"""What ranks exchange as their number grows: one rank of a simulated world asks its groups for what the estimate says,
and for nothing that grows with all the others. And what is done once, as a model's layers become more."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from benchmarks.scale import gpt, status_allreduces
from benchmarks.support.ranks import model_parallel
from megatron_fp8.estimate.communication import stage_traffic
from megatron_fp8.estimate.config_reader import Settings, read
from megatron_fp8.estimate.model_state import chunk_buffers
from tests.support.estimate_cases import CASES
from tests.support.estimates import _trained, options
from tests.support.fake_world import LOSS, Count, counted, simulated
from tests.support.process_state import put_back


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Megatron-Core is patched in this process, and its configs set variables."""
    with put_back():
        yield


HERE = (
    "delayed, interleaved, compact",
    "context parallel, mixed",
    "latent attention, experts, two tokens, all layouts",
)

MTP_TIED = "two tokens predicted, tied over stages"  # which Megatron-Core alone cannot save


def of_a_world(name: str, world: int) -> tuple[list[str], Settings]:
    """A case of the estimate's, on more ranks: as many microbatches on each."""
    ranks, config, changes = CASES[name]
    few = read(options(config, **changes), gpus=ranks)
    batch = few.microbatches * few.train.micro_batch_size * world // few.model.model_ranks
    arguments = options(config, **{**changes, "train__global_batch_size": batch})
    return arguments, read(arguments, gpus=world)


def an_iteration(name: str, world: int, stage: int) -> tuple[dict[str, Count], Settings]:
    """What the first rank of a stage asks for in an iteration."""
    arguments, settings = of_a_world(name, world)
    first = stage * world // settings.model.pipeline_model_parallel_size
    with simulated(first, world), _trained(arguments, iterations=1) as (step, _, _), counted() as found:
        step(1)
    return found, settings


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in HERE else pytest.mark.long) for name in CASES]
)
@pytest.mark.parametrize("world", [pytest.param(8, marks=pytest.mark.long), 512])
def test_an_iteration_asks_for_what_the_estimate_says(name: str, world: int) -> None:
    stages = of_a_world(name, world)[1].model.pipeline_model_parallel_size
    found, settings = an_iteration(name, world, stages - 1)
    expected, calls = Counter[str](), Counter[str]()
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == stages - 1]
    for one in stage_traffic(settings, chunks):
        expected[one.call] += one.bytes
        calls[one.call] += one.calls
    verdicts = status_allreduces(settings, chunks)
    calls["all-reduce"] += len(verdicts) + 1
    expected["all-reduce"] += sum(one.bytes for one in verdicts) + LOSS
    assert {call: one.calls for call, one in found.items()} == dict(calls)
    # Of tokens to experts the mean over ranks is known, and this is one rank: trainings hold it (test_estimate.py).
    exact = {call for call in calls if call != "all-to-all"}
    assert {call: found[call].bytes for call in exact} == {call: expected[call] for call in exact}


# ------------------------------------------------------------------------------------------- once a run, and once a save


def once(name: str, world: int, rank: int, folder: Path) -> dict[str, dict[str, Count]]:
    """What a rank asks for at start-up, for the report, for telemetry and for a checkpoint."""
    from megatron_fp8.files.checkpoint import Manifest
    from megatron_fp8.mcore.checkpoint import saver
    from megatron_fp8.mcore.checkpoint.training_state import sharded_state
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.sites import check_plan, fp8_linears
    from megatron_fp8.telemetry.replica_dedup import agree
    from megatron_fp8.train.health.finite_check import first_not_finite

    parts: dict[str, dict[str, Count]] = {}

    def part(what: str, work: Callable[[], Any]) -> Any:
        with counted() as found:
            done = work()
        parts[what] = found
        return done

    with simulated(rank, world), _trained(of_a_world(name, world)[0], iterations=0) as (step, chunks, _):
        part("plan", lambda: check_plan(chunks))
        part("report", lambda: site_report(chunks))
        shares = {linear.fp8_site.plan.name: linear.fp8_share for linear in fp8_linears(chunks)}
        part("telemetry", lambda: agree(shares, dist.group.WORLD))
        part("first iteration", lambda: step(0))
        part("failure", lambda: first_not_finite(chunks))
        state = part("state", lambda: sharded_state(chunks, step.optimizer))
        saving = saver.Saver(folder, patience=1)
        with (  # what other ranks would tell: the first rank's folder, and their plans
            mock.patch.object(
                saver, "broadcast_value", saver.broadcast_value if rank == 0 else lambda _, own, group: own
            ),
            mock.patch.multiple(saver.Shards, settle=mock.DEFAULT, finish=mock.DEFAULT),
        ):
            part("save", lambda: saving.save(state, Manifest(1)))
    return parts


@pytest.mark.parametrize(
    ("rank", "name"),
    [(0, "mxfp8, stages, tied, gathered, FP8 output layer"), (-1, "tensorwise, fp8_param, sharded")],
    ids=["the first rank", "the last rank"],
)
def test_nothing_that_is_asked_once_grows_with_the_ranks(tmp_path: Path, rank: int, name: str) -> None:
    few, many = (once(name, world, rank % world, tmp_path / str(world)) for world in (64, 512))
    for what, found in many.items():
        assert not {"gather", "scatter"} & set(found), what
        everybody = {call for call, one in found.items() if one.peers == 512}
        assert everybody <= {"all-reduce", "broadcast", *(["send"] if what == "save" else [])}, what
        for call in everybody:
            assert found[call].calls == few[what][call].calls, (what, call)
            # Data parallel ranks have a number each, of which the first is looked for (telemetry/replica_dedup.py).
            more = 8 * (512 - 64) if what == "telemetry" else 64
            assert found[call].largest <= few[what][call].largest + more, (what, call)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in (*HERE, MTP_TIED) else pytest.mark.long)
        for name, (_, _, changes) in CASES.items()
        if changes.get("optimizer__use_distributed_optimizer")
    ],
)
@pytest.mark.parametrize("world", [pytest.param(8, marks=pytest.mark.long), 512])
def test_each_rank_stores_the_masters_and_moments_that_it_holds(name: str, world: int) -> None:
    """And the weights that follow from them: no more than its part of the buffers, and nothing is sent."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_base

    from megatron_fp8.mcore.checkpoint.training_state import sharded_state

    arguments, settings = of_a_world(name, world)
    stages = settings.model.pipeline_model_parallel_size
    first = (stages - 1) * world // stages
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == stages - 1]
    part = sum(buffer.size // buffer.ranks for chunk in chunks for buffer in chunk_buffers(settings, chunk))
    for rank in (first, world - 1):
        with simulated(rank, world), _trained(arguments, iterations=0) as (step, parts, _):
            with counted() as found:
                state = sharded_state(parts, step.optimizer)
            assert all(one.bytes <= 64 * one.calls for one in found.values()), found
            stored = Counter[str]()
            for shard in nested_values(extract_sharded_base(state["optimizer"])[0]):
                stored[shard.key.split(".")[2]] += shard.data.numel()
            weights = sum(shard.data.numel() for shard in state["parts"])
        assert len(stored) == 3 and set(stored.values()) == {weights}, stored
        assert weights <= part and (weights > 0.9 * part or rank != first), (weights, part)


# ------------------------------------------------------------------------------------------------------- many layers


@contextmanager
def calls() -> Iterator[list[int]]:
    """How many functions are called inside, Python's and C's."""
    found = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        found[0] += event in ("call", "c_call")

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # what it calls for what earlier tests left is no part of this
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(before)
        gc.enable()


def of_many_layers(layers: int, experts: int, folder: Path) -> dict[str, int]:
    """Calls of what is done once with Megatron-Core's GPTModel on the meta device, and what that makes."""
    from megatron_fp8.mcore.checkpoint.store import Shards, prepare
    from megatron_fp8.mcore.checkpoint.training_state import model_state
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.sites import check_plan

    parts: dict[str, int] = {}

    def part(what: str, work: Callable[[], Any]) -> Any:
        with calls() as found:
            done = work()
        (parts[what],) = found
        return done

    with simulated(0, 1), model_parallel():
        model = gpt(layers, experts)
        assert {weight.device.type for weight in model.parameters() if weight.dim() > 1} == {"meta"}
        part("plan", lambda: check_plan([model]))
        entries = part("report", lambda: site_report([model]))
        linears = [f"mlp.experts.local_experts.{e}" for e in range(experts)]
        wanted = {f"{linear}.{fc}" for linear in linears for fc in ("linear_fc1", "linear_fc2")}
        wanted |= {"self_attention.linear_qkv", "self_attention.linear_proj"}
        names = [f"decoder.layers.{layer}.{linear}" for layer in range(layers) for linear in wanted]
        assert {one["name"] for one in entries if one["precision"] == "fp8"} == set(names)
        state = part("state", lambda: model_state([model]))
        shards = Shards(folder, part("shards", lambda: prepare(state, copy=False)).tensors, 0)
        mine = part("checkpoint's plan", shards.plan)
        part("checkpoint's plan, joined", lambda: shards.settle([mine]))
        part(".metadata", lambda: shards.finish([]))
        assert len(mine.items) > 9 * len(names)  # scale, history and warmth of each of three tensors
    parts["its bytes"] = (folder / ".metadata").stat().st_size
    parts["report's bytes"] = len(json.dumps(entries))
    return parts


def test_what_is_done_once_grows_with_the_layers_and_no_faster(tmp_path: Path) -> None:
    of_many_layers(1, 3, tmp_path)  # what is done once a process
    two, four, eight = (of_many_layers(layers, 3, tmp_path) for layers in (2, 4, 8))
    for what, count in eight.items():
        each = (four[what] - two[what]) / 2
        # Names that meet in a dictionary are compared, and how many do is another number in each process.
        assert count - four[what] <= 1.2 * 4 * each, (what, two[what], four[what], count)

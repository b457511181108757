"""FP16 models under Megatron-Core: gradients with and without the loss scale, overflows skipped by all ranks together."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import fp8_config, record_steps
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.iteration import iteration_counts
from megatron_fp8.mcore.optimizer.loss_scaler import scalers
from megatron_fp8.mcore.runtime import state_of
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from tests.support.nonfinite_models import OVERLAP, made_sick, masters
from tests.support.resume import Training

FP16: dict[str, Any] = {
    "fp16": True,
    "bf16": False,
    "params_dtype": torch.float16,
    "pipeline_dtype": torch.float16,
}
SMALL: dict[str, Any] = {"sequence": 64, "micro_batch": 2, "global_batch": 4}
SIZE = {"hidden_size": 128, "ffn_hidden_size": 256}
SCALER = {"initial_loss_scale": 2.0**14, "hysteresis": 2, "loss_scale_window": 2}
MOE = {
    "num_moe_experts": 2,
    "moe_ffn_hidden_size": 256,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


@dataclass
class Seen:
    """What one rank saw, an entry for each step; ``scales`` after it, of each optimizer of the chain."""

    losses: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)
    scales: list[list[float]] = field(default_factory=list)
    nonfinite: list[int] = field(default_factory=list)
    skipped: int = 0
    histories_finite: bool = True


def fp16_training(
    layout: Layout,
    recipe: str | None,
    sick: dict[int, tuple[str, float]],
    steps: int,
    fields: dict[str, Any],
    ddp: dict[str, Any],
    sick_rank: int = 1,
) -> Seen:
    """A rank case: steps in FP16, in some of them NaN or Inf in weights, inputs or gradients of one rank."""
    seen = Seen()
    with model_parallel(layout):
        config = fp8_config(layout, recipe, **{**SIZE, **FP16, **fields})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64, ddp=ddp)
        optimizer = build_optimizer(config, chunks, ddp=ddp, optim=SCALER)
        record_steps(optimizer, seen.stepped)
        for step in range(steps):
            before = masters(optimizer)
            ill = step in sick and dist.get_rank() == sick_rank
            with made_sick(chunks[0], *sick[step]) if ill else nullcontext():
                loss, _ = train_step(config, chunks, optimizer, step, **SMALL)
            seen.losses.append(loss)
            seen.changed.append(masters(optimizer) != before)
            seen.scales.append([float(scaler.scale) for scaler in scalers(optimizer)])
            seen.nonfinite.append(iteration_counts()["nonfinite"])
        seen.skipped = scalers(optimizer)[0].rule.skipped
        for slot in state_of(config).slots():
            if slot.delayed is not None:
                kept = slot.arena.saved_slot(slot)
                seen.histories_finite &= all(
                    bool(kept[part].isfinite().all()) for part in ("scale", "amax_history")
                )
    return seen


# Two overflows in succession halve the scale once (hysteresis 2), one alone does not; two clean steps double it.
SICK = {1: ("inputs", math.inf), 2: ("gradients", math.nan), 4: ("weights", math.inf)}
SCALES = [2.0**14, 2.0**14, 2.0**13, 2.0**13, 2.0**13, 2.0**13, 2.0**14]
LAYOUTS: dict[str, tuple[Layout, dict[str, Any], dict[str, Any]]] = {
    "tp2-sp": (Layout(tp=2, sp=True), {}, {}),
    "dp2-distributed": (Layout(), {}, OVERLAP),
    "ep2": (Layout(ep=2), MOE, {}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_skip_by_all_ranks_and_one_scale_everywhere(ranks: RankPool, name: str) -> None:
    layout, fields, ddp = LAYOUTS[name]
    everyone = ranks(2).run(fp16_training, layout, "delayed", SICK, len(SCALES), fields, ddp)
    clean = [step not in SICK for step in range(len(SCALES))]
    for seen in everyone:
        assert seen.stepped == seen.changed == clean
        assert [set(scales) for scales in seen.scales] == [{scale} for scale in SCALES]
        assert [n == 0 for n in seen.nonfinite] == clean
        assert seen.skipped == len(SICK) and seen.histories_finite
        losses = [loss for loss, good in zip(seen.losses, clean, strict=True) if good]
        assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert everyone[0].losses[0] == everyone[1].losses[0]


def overflow_after_the_reduction(fp16: bool, experts: bool) -> tuple[list[bool], list[bool], list[float]]:
    """A rank case: three steps without FP8; in the second, one reduced gradient is infinite on rank 1 alone.

    It is that of an expert, which the other rank does not have, or of a weight of which the other rank has a copy.
    Returns (stepped, changed, scales of the dense weights' optimizer and of the experts').
    """
    stepped: list[bool] = []
    changed: list[bool] = []
    layout = Layout(ep=2) if experts else Layout()
    with model_parallel(layout):
        fields = {**SIZE, **(MOE if experts else {}), **(FP16 if fp16 else {})}
        config = fp8_config(layout, None, **fields)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64)
        scaling = {**SCALER, "hysteresis": 1} if fp16 else {"loss_scale": 1.0}
        optimizer = build_optimizer(config, chunks, optim=scaling)
        step, sick = optimizer.step, "local_experts" if experts else "linear_qkv"

        def step_with_overflow() -> Any:
            if len(stepped) == 1 and dist.get_rank() == 1:
                weight = next(p for name, p in chunks[0].named_parameters() if sick in name)
                weight.main_grad.view(-1)[3] = math.inf
            return step()

        optimizer.step = step_with_overflow
        record_steps(optimizer, stepped)
        for index in range(3):
            before = masters(optimizer)
            train_step(config, chunks, optimizer, index, **SMALL)
            changed.append(masters(optimizer) != before)
        return stepped, changed, [float(scaler.scale) for scaler in scalers(optimizer)]


@pytest.mark.parametrize(
    ("fp16", "experts"), [(True, True), (False, False)], ids=["fp16-expert", "bf16-replica"]
)
def test_what_one_rank_alone_finds_is_everybodys(ranks: RankPool, fp16: bool, experts: bool) -> None:
    """Megatron-Core alone lowers the experts' scale only, and lets each replica decide for itself."""
    for stepped, changed, scales in ranks(2).run(overflow_after_the_reduction, fp16, experts):
        assert stepped == changed == [True, False, True]
        assert scales == ([2.0**13] * (2 if experts else 1) if fp16 else [])


def resumed(layout: Layout, recipe: str, ddp: dict[str, Any], folder: str) -> dict[str, tuple[Any, Any]]:
    """A rank case: what differs between five steps and three, a checkpoint, a new model and two more; {}: nothing.

    A step before the checkpoint is skipped, and a growth of the scale is due in the step after it.
    """

    def started(seed: int) -> Training:
        with mock.patch("tests.support.resume.build_optimizer", with_scaler):
            training = Training(layout, recipe, {**SIZE, **FP16}, ddp, seed=seed, **SMALL)
        record_steps(training.optimizer, [])
        return training

    def scaler(training: Training) -> list[dict[str, float]]:
        states = [each.state_dict() for each in scalers(training.optimizer)]
        return [{name: float(value) for name, value in state.items()} for state in states]

    found: list[dict[str, Any]] = []
    with model_parallel(layout):
        training = started(7)
        training.steps(1)
        with made_sick(training.chunks[0], "inputs", math.inf):
            training.steps(1)
        training.steps(1)
        at_save = scaler(training)
        checkpoint = training.save(folder)
        found.append({"at load": at_save, "losses": training.steps(2), "at end": scaler(training)})
        found[0] |= training.digests()
    with model_parallel(layout, seed=99):
        training = started(8)
        notes = training.load(checkpoint)
        found.append({"at load": scaler(training), "losses": training.steps(2), "at end": scaler(training)})
        found[1] |= training.digests()
    assert notes == []
    assert at_save == [{"scale": 2.0**14, "growth_tracker": 1, "hysteresis_tracker": 1, "skipped": 1}]
    assert found[0]["at end"][0] == {
        "scale": 2.0**15,
        "growth_tracker": 1,
        "hysteresis_tracker": 1,
        "skipped": 1,
    }
    return {name: (found[0][name], found[1][name]) for name in found[0] if found[0][name] != found[1][name]}


def with_scaler(config: Any, chunks: list[Any], *, ddp: Any, optim: dict[str, Any]) -> Any:
    """build_optimizer with a loss scale that moves soon."""
    scaling = {"initial_loss_scale": 2.0**15, "hysteresis": 1, "loss_scale_window": 2}
    return build_optimizer(config, chunks, ddp=ddp, optim={**optim, **scaling})


@pytest.mark.parametrize(
    ("layout", "recipe", "ddp"),
    [pytest.param(Layout(pp=2), "mxfp8", {}, marks=pytest.mark.long), (Layout(), "delayed", OVERLAP)],
    ids=["pp2", "dp2-distributed"],
)
def test_a_resumed_run_has_the_scale_and_every_bit(
    ranks: RankPool, tmp_path: Any, layout: Layout, recipe: str, ddp: dict[str, Any]
) -> None:
    for differences in ranks(2).run(resumed, layout, recipe, ddp, str(tmp_path)):
        assert differences == {}

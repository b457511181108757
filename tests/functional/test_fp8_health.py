"""NaN and Inf on one rank: counted, the step skipped on all ranks together, nothing poisoned, the next step trains."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.fp8_gpt import NARROW, OPTIONS, fp8_config, record_steps
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.iteration import iteration_counts
from megatron_fp8.mcore.runtime import state_of
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from tests.support.long_cases import some
from tests.support.nonfinite_models import OVERLAP, made_sick, masters

SICK_RANK = 1
STEPS = 7
# Step -> where, and what is put there.
SICK = {1: ("weights", math.nan), 3: ("inputs", math.inf), 5: ("gradients", math.nan)}
SICK_OTHERWISE = {1: ("weights", -math.inf), 3: ("inputs", math.nan), 5: ("gradients", math.inf)}


@dataclass
class Health:
    """What one rank saw, a list entry for each step."""

    losses: list[float]
    stepped: list[bool]
    nonfinite: list[int]
    changed: list[bool]
    scales_finite: list[bool]
    collectives: list[int]
    learned_scales: list[int]


def sick_training(
    layout: Layout,
    recipe: str,
    sick: dict[int, tuple[str, float]],
    fields: dict[str, Any],
    ddp: dict[str, Any],
) -> Health:
    """A rank case: seven steps, three of them with NaN or Inf in weights, inputs or gradients of one rank."""
    seen = Health([], [], [], [], [], [], [])
    if layout.tp == 1:
        fields = {**NARROW, **fields}
    # One microbatch, but where stages hand several to each other.
    batch = {**OPTIONS, "global_batch": OPTIONS["global_batch"] // layout.tp}
    with model_parallel(layout):
        config = fp8_config(layout, recipe, **fields)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128, ddp=ddp)
        optimizer = build_optimizer(config, chunks, ddp=ddp)
        record_steps(optimizer, seen.stepped)
        for index in range(STEPS):
            before = masters(optimizer)
            ill = index in sick and dist.get_rank() == SICK_RANK
            with made_sick(chunks[0], *sick[index]) if ill else nullcontext():
                loss, _ = train_step(config, chunks, optimizer, index, **batch)
            seen.losses.append(loss)
            seen.nonfinite.append(iteration_counts()["nonfinite"])
            seen.collectives.append(iteration_counts()["amax_collectives"])
            seen.changed.append(masters(optimizer) != before)
            state = state_of(config)
            scales = torch.cat([arena.scale[: len(arena.slots)] for arena in state.arenas])
            seen.scales_finite.append(bool(scales.isfinite().all()) and bool((scales > 0).all()))
            seen.learned_scales.append(int((scales != 1).sum()))
    return seen


MOE = {"num_moe_experts": 2, "moe_ffn_hidden_size": 256, "moe_router_load_balancing_type": "none"}
LAYOUTS: dict[str, tuple[Layout, dict[str, Any], dict[str, Any]]] = {
    "tp2-sp": (Layout(tp=2, sp=True), {}, {}),
    "pp2": (Layout(pp=2), {}, {}),
    "dp2": (Layout(), {}, {}),
    "dp2-overlap": (Layout(), {}, OVERLAP),
    "dp2-tp-only-amax": (Layout(), {"tp_only_amax_red": True}, {}),
}


def check(everyone: list[Health], sick: dict[int, tuple[str, float]]) -> None:
    clean = [step not in sick for step in range(STEPS)]
    for seen in everyone:
        assert seen.stepped == clean
        assert [n == 0 for n in seen.nonfinite] == clean
        assert seen.changed == clean
        assert all(seen.scales_finite)
        losses = [loss for loss, is_clean in zip(seen.losses, clean, strict=True) if is_clean]
        assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    assert len({tuple(seen.nonfinite) for seen in everyone}) == 1, "ranks disagree on what was found"


HERE = (("tp2-sp", "delayed"), ("pp2", "delayed"), ("dp2-overlap", "delayed"), ("dp2-overlap", "mxfp8"))
"""The verdict over each kind of group, with a state that could be poisoned and without one."""


@pytest.mark.parametrize(
    ("name", "recipe"), some([*((name, "delayed") for name in LAYOUTS), ("pp2", "mxfp8"), HERE[-1]], *HERE)
)
def test_step_is_skipped_together_and_nothing_is_poisoned(ranks: RankPool, name: str, recipe: str) -> None:
    layout, fields, ddp = LAYOUTS[name]
    everyone = ranks(2).run(sick_training, layout, recipe, SICK, fields, ddp)
    check(everyone, SICK)
    for seen in everyone:
        # Every tensor has its delayed scale after the first iteration, and keeps one through the sick ones.
        assert (min(seen.learned_scales) > 0) == (recipe == "delayed")
        assert len(set(seen.learned_scales)) == 1


@pytest.mark.parametrize("recipe", some(["tensorwise", "rowwise", "blockwise"], "blockwise"))
def test_every_recipe_counts(ranks: RankPool, recipe: str) -> None:
    check(ranks(2).run(sick_training, Layout(tp=2), recipe, SICK_OTHERWISE, {}, {}), SICK_OTHERWISE)


def test_one_ranks_expert(ranks: RankPool) -> None:
    """Expert ranks share no amax group with each other; the verdict reaches all of them."""
    fields = {**MOE, "moe_token_dispatcher_type": "alltoall"}
    check(ranks(2).run(sick_training, Layout(ep=2), "delayed", SICK, fields, {}), SICK)


def test_history_keeps_no_inf(ranks: RankPool) -> None:
    """An infinite amax changes neither scale nor history; a saturated one next to it is as good as any."""
    sick, well = ranks(2).run(histories, True), ranks(2).run(histories, False)
    for (scales, infinite), (healthy, none) in zip(sick, well, strict=True):
        assert len(infinite) == 4 and not none, (
            "the residual stream takes the Inf to every row-parallel linear"
        )
        assert all(name.endswith("grad_output") for name in infinite)
        before, after = scales
        for name in before:
            if name in infinite:
                assert after[name] == before[name], name
            elif not name.endswith("grad_output"):
                assert after[name] == healthy[1][name], name
            assert math.isfinite(after[name]) and after[name] > 0


def histories(sick: bool) -> tuple[list[dict[str, float]], list[str]]:
    """A rank case: scales by slot name after each of two steps without learning, the second with an Inf gradient on one
    rank, or not; and the slots that saw an infinite amax."""
    layout, scales = Layout(tp=2), []
    with model_parallel(layout):
        config = fp8_config(layout, "delayed", fp8_amax_history_len=4, fp8_amax_compute_algo="max")
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128)
        optimizer = build_optimizer(config, chunks, optim={"lr": 0.0})
        step = optimizer.step
        optimizer.step = lambda: (True, 0.0, step()[2])
        for index in range(2):
            poisoned = sick and index == 1 and dist.get_rank() == SICK_RANK
            with made_sick(chunks[0], "gradients", math.inf) if poisoned else nullcontext():
                train_step(config, chunks, optimizer, 0, **OPTIONS)
            slots = state_of(config).slots()
            scales.append({slot.name: float(slot.scale) for slot in slots})
        for slot in slots:
            assert slot.delayed is not None
            assert bool(slot.arena.history(slot.delayed, slot.fmt)[1].isfinite().all())
        return scales, [slot.name for slot in slots if slot.arena.last_amax[slot.index].isinf()]

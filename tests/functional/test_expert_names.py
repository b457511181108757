"""A name means one expert, whichever rank has it: overrides, reports, the guard's moves, checkpoints, experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import FP32, MOE, NARROW, fp8_config
from benchmarks.support.gpt import build_chunks, build_optimizer, train, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.diagnosis.variants import Variant, planned_cells, use_variant
from megatron_fp8.mcore.checkpoint.state_dict import fp8_state_dict, load_fp8_state_dict
from megatron_fp8.mcore.iteration import move_unhealthy_sites
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.runtime import state_of
from megatron_fp8.mcore.sites import check_plan, fp8_linears
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.state.guard import Finding
from tests.support.collectives import recorded
from tests.support.fp8_dispatch import config_of
from tests.support.long_cases import some
from tests.support.resume import Training

SMALL: dict[str, Any] = {**NARROW, **MOE, "num_layers": 1, "moe_ffn_hidden_size": 128}
SMALL["moe_shared_expert_intermediate_size"] = 64
OPTIONS: dict[str, Any] = {"sequence": 64, "micro_batch": 1, "global_batch": 4}
EXPERTS = "decoder.layers.0.mlp.experts.local_experts"
LAYOUTS = {"one": (1, Layout()), "ep2": (2, Layout(ep=2)), "ep2-etp2": (4, Layout(tp=2, sp=True, ep=2))}


def trained(layout: Layout, recipe: str, fields: dict[str, Any], ddp: dict[str, Any]) -> dict[str, Any]:
    """A rank case: losses and norms of two iterations, this rank's sites, and everybody's report."""
    with model_parallel(layout):
        config = fp8_config(layout, recipe, **{**SMALL, **fields})
        run = train(config, spec=get_gpt_layer_fp8_spec, steps=2, ddp=ddp, **OPTIONS)
        plans = [linear.fp8_site.plan for linear in fp8_linears(run.chunks)]
        slots = [
            q.slot.name
            for linear in fp8_linears(run.chunks)
            for q in linear.fp8_site.quantizers.values()
            if q
        ]
        return {
            "losses": run.losses,
            "norms": run.grad_norms,
            "sites": [plan.name for plan in plans if EXPERTS in plan.name],
            "slots": slots,
            "report": [(e["name"], e["precision"], e["recipe"]) for e in site_report(run.chunks)],
        }


def overriding(expert: int) -> dict[str, Any]:
    return {**FP32, "fp8_overrides": {f"*.local_experts.{expert}.linear_fc?": "bf16"}}


GATHER = {"moe_token_dispatcher_type": "allgather"}
HOW: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grouped": ("ep2", {"moe_grouped_gemm": True}, {}),
    "in turn": ("ep2", {}, {}),
    "cut": ("ep2-etp2", {"moe_grouped_gemm": True, **GATHER}, {}),
    "distributed optimizer": ("ep2", {"moe_grouped_gemm": True}, {"use_distributed_optimizer": True}),
}


@pytest.fixture(scope="module")
def of_one(ranks: RankPool) -> Any:
    """The training of one rank that keeps an expert out of FP8, each run once."""
    known: dict[int, dict[str, Any]] = {}

    def run(expert: int) -> dict[str, Any]:
        if expert not in known:
            (known[expert],) = ranks(1).run(trained, Layout(), "blockwise", overriding(expert), {})
        return known[expert]

    return run


@pytest.mark.parametrize("how", some(HOW, "in turn", "cut"))
def test_an_override_of_one_expert_is_of_that_one_on_any_ranks(
    ranks: RankPool, of_one: Any, how: str
) -> None:
    """Its training is nearer to one rank's than that with another expert out of FP8 by far."""
    name, fields, ddp = HOW[how]
    world, layout = LAYOUTS[name]
    everyone = ranks(world).run(trained, layout, "blockwise", {**overriding(3), **fields}, ddp)
    one, other = of_one(3), of_one(1)
    for found in everyone:
        assert found["report"] == one["report"]
        step, apart = (abs(of["losses"][0] - one["losses"][0]) for of in (found, other))
        assert step < 1e-6 < apart / 10, (step, apart)
        step, apart = (abs(of["norms"][0] - one["norms"][0]) for of in (found, other))
        assert step < apart / 3, (step, apart)
    precision = {site: what for site, what, _ in one["report"] if EXPERTS in site}
    assert list(precision) == [f"{EXPERTS}.{e}.linear_fc{n}" for e in range(4) for n in (1, 2)], (
        "each once, in order"
    )
    assert {site for site, what in precision.items() if what == "bf16"} == {
        f"{EXPERTS}.3.linear_fc{n}" for n in (1, 2)
    }
    assert {site for found in everyone for site in found["sites"]} == set(precision)
    for found in everyone:  # no two experts' tensors share a name
        assert len(found["sites"]) == 4 and len(set(found["slots"])) == len(found["slots"])


def test_a_recipe_of_one_expert_with_histories_and_fp8_parameters(ranks: RankPool) -> None:
    """Ranks that hold an expert that is kept out of FP8 train beside ranks that hold none."""
    fields = {
        "fp8_param": True,
        "fp8_overrides": {f"{EXPERTS}.{e}.*": "bf16" for e in (2, 3)},
        "moe_grouped_gemm": True,
    }
    everyone = ranks(2).run(trained, Layout(ep=2), "delayed", fields, {"use_distributed_optimizer": True})
    (one,) = ranks(1).run(trained, Layout(), "delayed", fields, {"use_distributed_optimizer": True})
    assert [found["report"] for found in everyone] == [one["report"]] * 2
    for found in everyone:
        assert found["losses"] == pytest.approx(one["losses"], rel=2e-3)


# -------------------------------------------------------------------------------------------- what is refused


def refused(layout: Layout, overrides: dict[str, str]) -> str:
    """A rank case: what a model with these overrides is refused with; '' if it is not."""
    with model_parallel(layout):
        config = fp8_config(layout, "blockwise", **{**SMALL, "fp8_overrides": overrides})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64)
        try:
            check_plan(chunks)
        except ValueError as error:
            return str(error)
        return ""


SAID: dict[str, tuple[dict[str, str], str]] = {
    "of another rank": ({"*.local_experts.0.*": "bf16", "*.local_experts.3.*": "bf16"}, ""),
    "of no rank": (
        {"*.local_experts.4.*": "bf16"},
        "fp8_overrides: '*.local_experts.4.*' matches no GEMM site; the sites are decoder.layers.0.self_attention",
    ),
    "none left but on one rank": ({"*": "bf16", "*.local_experts.3.linear_fc1": "fp8"}, ""),
    "none left": ({"*": "bf16"}, "the settings leave none of 12 GEMM sites in FP8"),
    "on one rank": ({f"{EXPERTS}.3.linear_fc1:weight": "e5m2"}, f"{EXPERTS}.3.linear_fc1"),
    "on both": ({"*.local_experts.[13].linear_fc2:weight": "e5m2"}, f"{EXPERTS}.1.linear_fc2"),
}


@pytest.mark.parametrize("case", SAID)
def test_every_rank_says_the_same(ranks: RankPool, case: str) -> None:
    overrides, said = SAID[case]
    one, other = ranks(2).run(refused, Layout(ep=2), overrides)
    assert one == other and (said in one if said else not one), (one, other)
    assert "\n" not in one


# ------------------------------------------------------------------------------------------------ checkpoints

GUARDED: dict[str, Any] = {**SMALL, "fp8_guard": True, "moe_grouped_gemm": True}


def guarded(layout: Layout, folder: str, ill: str) -> tuple[list[list[Any]], list[tuple[float, float]]]:
    """A rank case: a training whose guard finds a tensor ill after its second iteration, and saves. (Moves, the next
    iteration.)"""
    with model_parallel(layout):
        training = Training(layout, "delayed", GUARDED, {}, seed=7, **OPTIONS)
        training.steps(2)
        state = state_of(training.config)
        if any(slot.name == ill for slot in state.slots()):
            state.findings = [Finding(ill, "saturates", 3, 9.0)]
        move_unhealthy_sites(training.chunks, state, partial=True)
        training.save(folder)
        assert state.guard is not None
        return [list(move) for move in state.guard.moves.values()], training.steps(1)


def resumed(layout: Layout, folder: str) -> tuple[list[str], list[str], list[tuple[float, float]]]:
    """A rank case: notes, the sites that are not in FP8 then, and the next iteration."""
    with model_parallel(layout, seed=99):
        training = Training(layout, "delayed", GUARDED, {}, seed=8, **OPTIONS)
        notes = training.load(Path(folder) / "iter_0000002")
        plans = [linear.fp8_site.plan for linear in fp8_linears(training.chunks)]
        return notes, [plan.name for plan in plans if plan.precision != "fp8"], training.steps(1)


def test_a_move_of_one_expert_goes_along_to_other_layouts(ranks: RankPool, tmp_path: Path) -> None:
    site = f"{EXPERTS}.3.linear_fc1"
    everyone = ranks(2).run(guarded, Layout(ep=2), str(tmp_path), f"{site}.input")
    for moves, _ in everyone:
        assert [move[:2] for move in moves] == [[site, "bf16"]]
    ((notes, moved, again),) = ranks(1).run(resumed, Layout(), str(tmp_path))
    assert moved == [site] and notes[0].startswith(f"fp8_guard had moved 1 sites ({site}: bf16)")
    assert again[0][0] == pytest.approx(everyone[0][1][0][0], rel=2e-3)
    back = ranks(2).run(resumed, Layout(ep=2), str(tmp_path))
    assert [moved for _, moved, _ in back] == [[], [site]]
    assert [following for *_, following in back] == [following for _, following in everyone], "to the bit"


def numbered_from_0(layout: Layout) -> tuple[set[str], set[str]]:
    """A rank case: a state dict as it was when each rank numbered its experts from 0, loaded; (its keys, those now)."""
    with model_parallel(layout):
        run = train(fp8_config(layout, "delayed", **SMALL), spec=get_gpt_layer_fp8_spec, steps=1, **OPTIONS)
        now = fp8_state_dict(run.chunks)
        before = {key.replace(".2.", ".0.").replace(".3.", ".1."): value for key, value in now.items()}
        zeros = {key: torch.ones_like(value) for key, value in now.items()}
        load_fp8_state_dict(run.chunks, zeros)
        load_fp8_state_dict(run.chunks, before)
        for key, value in fp8_state_dict(run.chunks).items():
            assert torch.equal(value, now[key]), key
        return set(before), set(now)


def test_state_that_was_saved_under_local_numbers(ranks: RankPool) -> None:
    (before, now), (older, newer) = ranks(2).run(numbered_from_0, Layout(ep=2))
    assert before == now == older != newer
    assert not any(EXPERTS in key for key in now & newer)


# ------------------------------------------------------------------------------------------------ experiments


def experiment(layout: Layout, expert: int | None) -> tuple[float, int]:
    """A rank case: an iteration in which one expert's first linear, of whichever rank, is in high precision; its loss,
    and how many all-to-alls were of bytes. None: every expert's is as planned."""
    with model_parallel(layout):
        config = config_of(layout, "blockwise")
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64)
        optimizer = build_optimizer(config, chunks)
        check_plan(chunks)
        sites = {linear.fp8_site.plan.name: linear.fp8_site for linear in fp8_linears(chunks)}
        name = f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc1"
        cells = {site: planned_cells(each.plan) for site, each in sites.items() if site != name}
        with recorded() as log, state_of(config).unrecorded(), use_variant(Variant("one", cells), sites):
            loss, _ = train_step(config, chunks, optimizer, 0, **OPTIONS)
        return loss, sum(s.dtype == torch.uint8 for s in log.sent if s.name == "all_to_all_single")


def test_experiments_with_one_rank_s_expert_are_known_to_the_ranks_that_send_it_tokens(
    ranks: RankPool,
) -> None:
    """All send that layer's tokens in BF16 then; gradients, and the other layer's tokens, go in codes."""
    planned = ranks(2).run(experiment, Layout(ep=2), None)
    without = ranks(2).run(experiment, Layout(ep=2), 3)
    assert planned[0] == planned[1] and without[0] == without[1]
    microbatches = OPTIONS["global_batch"] // 2
    assert [planned[0][1], without[0][1]] == [4 * microbatches, 3 * microbatches]

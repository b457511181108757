"""The guard in real training: a site whose input outgrows its delayed scale leaves FP8, on all ranks in one
iteration."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import MOE, NARROW, OPTIONS, fp8_config, record_steps
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.iteration import guard_moves, iteration_counts
from megatron_fp8.mcore.report import site_report
from megatron_fp8.mcore.runtime import state_of
from megatron_fp8.mcore.sites import fp8_linears, prepare
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from tests.support.command import APP, MEASURED, lines, run

ILL = "decoder.layers.0.mlp.linear_fc2"
STEPS = 7


@dataclass
class Seen:
    """What one rank saw; lists have an entry for each step."""

    losses: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    collectives: list[int] = field(default_factory=list)
    moves: list[list[tuple[Any, ...]]] = field(default_factory=list)
    plans: list[dict[str, tuple[str, str | None]]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


def guarded_training(layout: Layout, recipe: str, fields: dict[str, Any], ill: str) -> Seen:
    """A rank case: the output of one layer's SwiGLU grows threefold in each iteration, as outliers do."""
    seen = Seen()
    with model_parallel(layout):
        config = fp8_config(layout, recipe, **{**NARROW, **fields})
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128)
        optimizer = build_optimizer(config, chunks)
        record_steps(optimizer, seen.stepped)
        step = 0

        def grow(module: Any, args: Any) -> Any:
            x = args[0]
            return (x + (x * (3.0**step - 1)).detach(), *args[1:])  # its gradient does not grow

        prepare(chunks)
        for linear in fp8_linears(chunks):
            if linear.fp8_site.plan.name == ill:
                linear.register_forward_pre_hook(grow)
        state = state_of(config)
        for step in range(STEPS):
            loss, _ = train_step(config, chunks, optimizer, step, **OPTIONS)
            seen.losses.append(loss)
            seen.collectives.append(iteration_counts()["amax_collectives"])
            moves = state.guard.moves if state.guard else {}
            seen.moves.append([tuple(move) for move in moves.values()])
            plans = [linear.fp8_site.plan for linear in fp8_linears(chunks)]
            seen.plans.append({p.name: (p.precision, p.recipe and type(p.recipe).__name__) for p in plans})
        seen.report = {entry["name"]: entry for entry in site_report(chunks)}
    return seen


GUARD: dict[str, Any] = {"fp8_guard": True, "fp8_guard_patience": 2}


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (Layout(tp=2, sp=True), {}),
        pytest.param(Layout(pp=2), {}, marks=pytest.mark.long),
        (Layout(ep=2), {**MOE, "add_bias_linear": False}),
    ],
    ids=["tp2-sp", "pp2", "ep2"],
)
def test_an_outgrown_scale_leaves_fp8_on_all_ranks_together(
    ranks: RankPool, layout: Layout, fields: Any
) -> None:
    ill = (
        ILL.replace("mlp.linear", "mlp.experts.local_experts.3.linear")
        if "num_moe_experts" in fields
        else ILL
    )
    seen = ranks(2).run(guarded_training, layout, "delayed", {**GUARD, **fields}, ill)
    for rank in seen:
        # Step 0 has no scale yet; 1 and 2 saturate by 3; so step 3 is the first one in BF16.
        assert rank.moves[1] == [] and rank.moves == seen[0].moves
        assert len(rank.moves[2]) == 1, rank.moves[2]
        ((site, to, iteration, why),) = rank.moves[2]
        assert (site, to, iteration) == (ill, "bf16", 3)
        assert why.startswith("input saturates for 2 iterations (amax "), why
        assert rank.moves[-1] == rank.moves[2]
        assert all(rank.stepped) and len(set(map(len, rank.moves[2:]))) == 1
        assert len(set(rank.collectives[1:])) == 1
        for step, plans in enumerate(rank.plans):
            for name, (precision, _) in plans.items():
                assert precision == ("bf16" if name == ill and step >= 2 else "fp8"), (step, name)
    entry = seen[0].report[ill]
    assert entry["precision"] == "bf16" and entry["reason"].startswith(
        "fp8_guard, from iteration 4 on: input"
    )


def test_up_a_ladder(ranks: RankPool) -> None:
    (seen,) = ranks(1).run(guarded_training, Layout(), "delayed", {**GUARD, "fp8_guard": "ladder"}, ILL)
    ((site, to, iteration, _),) = seen.moves[-1]
    assert (site, to, iteration) == (ILL, "tensorwise", 3)
    assert seen.plans[-1][ILL] == ("fp8", "Float8CurrentScaling")
    assert seen.report[ILL]["recipe"] == "tensorwise"
    assert all(seen.stepped) and all(loss == loss for loss in seen.losses)


def test_what_was_asked_for_by_name_stays(ranks: RankPool) -> None:
    fields = {**GUARD, "fp8_overrides": {"*.linear_fc2": "delayed"}}
    (seen,) = ranks(1).run(guarded_training, Layout(), "delayed", fields, ILL)
    assert seen.moves[-1] == []


def test_healthy_training_is_left_alone_to_the_bit(ranks: RankPool) -> None:
    fields = {**GUARD, "fp8_guard_patience": 1}
    (on,) = ranks(1).run(guarded_training, Layout(), "delayed", fields, "no such site")
    (off,) = ranks(1).run(guarded_training, Layout(), "delayed", {}, "no such site")
    assert on.moves[-1] == [] and on.losses == off.losses
    assert torch.tensor(on.losses).isfinite().all()


def burst_of_nan() -> tuple[list[bool], bool, int]:
    """A rank case: NaN in four iterations' hidden states. Which steps were taken, whether weights are finite, moves."""
    layout, stepped = Layout(), []
    with model_parallel(layout):
        config = fp8_config(layout, "tensorwise", **GUARD)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=128)
        optimizer = build_optimizer(config, chunks)
        record_steps(optimizer, stepped)
        step = 0

        def spoil(module: Any, args: Any, kwargs: Any) -> Any:
            bad = 1 <= step <= 4
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * (float("nan") if bad else 1.0)}

        chunks[0].module.module.decoder.layers[0].register_forward_pre_hook(spoil, with_kwargs=True)
        for step in range(6):
            train_step(config, chunks, optimizer, step, **OPTIONS)
        finite = all(bool(p.isfinite().all()) for chunk in chunks for p in chunk.parameters())
        return stepped, finite, len(guard_moves(chunks))


def test_linears_that_left_fp8_still_see_nan(ranks: RankPool) -> None:
    """The guard must not make a training step on NaN that skips without it (test_fp8_health.py)."""
    ((stepped, finite, moves),) = ranks(1).run(burst_of_nan)
    assert stepped == [True, False, False, False, False, True] and finite and moves > 0


MOVED = "decoder.layers.2.mlp.linear_fc1"


@pytest.fixture(scope="module")
def guarded(folder: Any, config: Any) -> Any:
    """run(name, *options): a training of four iterations with the guard; after the second one a weight outgrows its
    scale."""

    def train(name: str, *options: str) -> Any:
        guard = ("--model.fp8_guard=true", "--model.fp8_guard_patience=1", "--train.log_interval=1")
        out = folder / "runs" / name
        done = run(APP, "outgrow", 2, "train", f"--config={config}", f"--run_dir={out}", *guard, *options)
        assert done.returncode == 0, done.stderr
        return done, out

    return train


def measured(out: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines(out / "metrics.jsonl")]


def test_a_run_says_it_records_it_and_goes_on_from_it(guarded: Any) -> None:
    done, whole = guarded("whole", "--checkpoint.save_interval=1")
    said = [line for line in done.stderr.splitlines() if "guard" in line]
    report = json.loads((whole / "report.json").read_text())
    moves = {move["site"]: move for move in report["guard"]}
    assert len(said) == len(moves) and moves[MOVED]["why"].startswith(
        "weight saturates for 1 iterations (amax 8"
    )
    assert any(
        line.startswith(f"megatron_fp8: guard: {MOVED} runs in bf16 from iteration 4 on: ") for line in said
    )
    assert {(move["to"], move["iteration"]) for move in moves.values()} == {("bf16", 3)}
    precision = {site["name"]: site["precision"] for site in report["sites"]}
    assert all(precision[name] == "bf16" for name in moves)
    fp8 = [line["fp8_gemms"] for line in measured(whole)]
    assert fp8[0] == fp8[1] == fp8[2] == fp8[3] + len(moves) * 3 * 2  # three GEMMs, two micro-batches

    done, again = guarded("again", f"--resume={whole / 'checkpoints' / 'iter_0000003'}")
    assert f"fp8_guard had moved {len(moves)} sites" in done.stdout
    assert measured(again) == measured(whole)[3:]

    undo = f"--model.fp8_overrides={{'{MOVED}': 'delayed'}}"
    done, back = guarded("back", f"--resume={whole / 'checkpoints' / 'iter_0000003'}", undo)
    assert f"fp8_guard had moved {len(moves) - 1} sites" in done.stdout
    assert measured(back)[0]["fp8_gemms"] == fp8[3] + 6


def test_a_resume_between_two_sick_iterations_moves_as_the_whole_run(guarded: Any) -> None:
    """The weight is too large in iterations 3 and 4, since its scale stays, and the checkpoint is from between."""
    options = ("--model.fp8_interval=100", "--model.fp8_guard_patience=2", "--train.train_iters=5")
    _, whole = guarded("row", "--checkpoint.save_interval=3", *options)
    _, again = guarded("row_again", f"--resume={whole / 'checkpoints' / 'iter_0000003'}", *options)
    moved = json.loads((whole / "report.json").read_text())["guard"]
    assert MOVED in {move["site"] for move in moved} and {move["iteration"] for move in moved} == {4}
    assert json.loads((again / "report.json").read_text())["guard"] == moved
    assert measured(again) == measured(whole)[3:]

"""A healing phase of some GEMMs: its iterations are those of a model whose overrides take the same GEMMs out of FP8."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import MOE, NARROW, Watched, fp8_config, watched_gemms
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.report.run import read_run
from megatron_fp8.train.report import format_report
from tests.support.command import MODEL, lines, run_all
from tests.support.long_cases import some

FPROP = ["*:fprop"]
LENGTH, BORDER = 3, 2
SMALL: dict[str, Any] = {"sequence": 64, "micro_batch": 2, "global_batch": 4}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1, "recompute_method": "uniform"}
GROUPED: dict[str, Any] = {**MOE, "moe_ffn_hidden_size": 128, "moe_grouped_gemm": True}


def build(layout: Layout, recipe: str, fields: dict[str, Any]) -> Any:
    from megatron_fp8.mcore.iteration import set_training_length
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    config = fp8_config(layout, recipe, **{**NARROW, **fields})
    set_training_length(config, LENGTH)
    chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64)
    return config, chunks, build_optimizer(config, chunks)


def step(model: Any, iteration: int) -> list[Any]:
    loss, norm = train_step(*model, iteration, **SMALL)
    return [loss, norm, *(p.main_grad.clone() for chunk in model[1] for p in chunk.parameters())]


def copy_training(source: Any, target: Any) -> None:
    """Weights, iteration (by which random bits are chosen) and histories, as far as ``target`` has them."""
    from megatron_fp8.mcore.runtime import state_of

    for mine, theirs in zip(source[1], target[1], strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            other.data.copy_(one.data)
    before, after = state_of(source[0]), state_of(target[0])
    after.iteration = before.iteration
    saved = {s.name: s.arena.saved_slot(s) for s in before.slots() if s.delayed is not None}
    for slot in after.slots():
        if slot.delayed is not None:
            slot.arena.load_slot(slot, saved[slot.name])


def healed(layout: Layout, recipe: str, fields: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """A rank case: the healing iteration, and the same one of a model with overrides: [loss, norm, gradients]."""
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.runtime import state_of
    from megatron_fp8.mcore.sites import prepare

    phases = {"fp8_high_precision_healing": 1 / LENGTH, "fp8_high_precision_healing_parts": parts}
    said, ours_ran, theirs_ran = io.StringIO(), Watched(), Watched()
    with model_parallel(layout), contextlib.redirect_stdout(said):
        ours = build(layout, recipe, {**fields, **phases})
        plain = build(layout, recipe, {**fields, "fp8_overrides": dict.fromkeys(parts, "bf16")})
        prepare(plain[1])
        for iteration in range(BORDER):
            step(ours, iteration)
        copy_training(ours, plain)
        with watched_gemms(ours_ran):
            mine = step(ours, BORDER)
        with watched_gemms(theirs_ran):
            theirs = step(plain, BORDER)
        amaxes = [
            {s.name: s.arena.last_amax[s.index].item() for s in state_of(model[0]).slots()}
            for model in (ours, plain)
        ]
        return {
            "ours": mine,
            "plain": theirs,
            "gemms": (dict(ours_ran.gemms), dict(theirs_ran.gemms)),
            "amaxes": amaxes,
            "phases": {entry["name"]: entry["phases"] for entry in site_report(ours[1])},
            "said": said.getvalue(),
        }


DISPATCH = {**GROUPED, "moe_fp8_dispatch": True}
CASES: dict[str, tuple[int, Layout, str, dict[str, Any], list[str]]] = {
    "nvfp4": (1, Layout(), "nvfp4", {}, FPROP),
    "tp2-sp-nvfp4-recompute": (2, Layout(tp=2, sp=True), "nvfp4", FULL, FPROP),
    "pp2-vpp2-delayed-sites": (
        2, Layout(pp=2, vpp=2), "delayed", {"num_layers": 4}, ["*.linear_fc1", "*.linear_proj:fprop"],
    ),
    "ep2-nvfp4-grouped": (2, Layout(ep=2), "nvfp4", GROUPED, FPROP),
    # One rank's experts read values, so no rank sends codes.
    "ep2-mxfp8-dispatch": (2, Layout(ep=2), "mxfp8", DISPATCH, ["*local_experts.0.linear_fc1:fprop", "*fc2:dgrad"]),
    "ep2-mxfp8-dispatch-site": (2, Layout(ep=2), "mxfp8", DISPATCH, ["*local_experts.3.*"]),
    "blockwise-dgrad": (1, Layout(), "blockwise", {}, ["*:dgrad"]),
    "delayed-wgrad": (1, Layout(), "delayed", {"fp8_amax_history_len": 2}, ["*:fprop", "*:wgrad"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "case", some([*CASES], "nvfp4", "tp2-sp-nvfp4-recompute", "pp2-vpp2-delayed-sites", "ep2-mxfp8-dispatch")
)
def test_healing_is_the_override_to_the_bit(ranks: RankPool, case: str) -> None:
    world, layout, recipe, fields, parts = CASES[case]
    for rank, seen in enumerate(ranks(world).run(healed, layout, recipe, fields, parts)):
        assert len(seen["ours"]) == len(seen["plain"]) > 10
        for mine, theirs in zip(seen["ours"], seen["plain"], strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs, case
        mine, theirs = seen["gemms"]
        assert mine == theirs, case
        assert "site" in case or any(precision == "bf16" for _, _, precision in mine), case
        own, plain = seen["amaxes"]
        assert {name: amax for name, amax in own.items() if name in plain} == plain
        if recipe == "delayed":  # histories go on, of operands too that nothing casts any more
            assert all(amax > 0 for amax in own.values()), own
        quantized = "fp4" if recipe == "nvfp4" else "fp8"
        if parts == FPROP:
            gemms = {"fprop": "bf16", "dgrad": quantized, "wgrad": quantized}
            entry = {"phase": "healing", "precision": quantized, "first": 3, "last": 3, "gemms": gemms}
            assert all(phases[-1] == entry for phases in seen["phases"].values() if phases)
        expected = (
            f"megatron_fp8: BF16 in {', '.join(parts)} from iteration 3 on, {quantized.upper()} in the rest\n"
        )
        assert seen["said"] == ("" if rank else expected)


def test_a_part_that_names_nothing_is_an_error(ranks: RankPool) -> None:
    assert "'*.linear_fc3'" in ranks(1).run(refused, ["*.linear_fc3"])[0]


def refused(parts: list[str]) -> str:
    """A rank case: the error of a model with these parts."""
    fields = {"fp8_high_precision_healing": 0.4, "fp8_high_precision_healing_parts": parts}
    with model_parallel(), pytest.raises(ValueError, match="fp8_high_precision_healing_parts") as error:
        step(build(Layout(), "mxfp8", fields), 0)
    return str(error.value)


# ------------------------------------------------------------------------------------------------------------- the app


def test_runs_resume_at_the_border_and_inside(tmp_path: Path) -> None:
    """An NVFP4 run whose last three iterations heal: resumed runs have its losses, and reports say what ran in what."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(["spam", "eggs", "ham", "tea", "\n"], k=60_000)))
    model = {k: v for k, v in MODEL.items() if not k.startswith(("fp8", "num_layers_at", "first_last"))}
    content = {
        "model": {**model, "num_layers": 2, "fp4": "e2m1"},
        "train": {"train_iters": 6, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64},
        "data": {"paths": [str(text)], "split": "80,20,0", "cache_dir": str(tmp_path / "cache")},
    }
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(content))  # JSON is YAML
    parts = ["--model.fp8_high_precision_healing=0.5", '--model.fp8_high_precision_healing_parts=["*:fprop"]']
    common = ["train", f"--config={config}"]
    saves = ["--checkpoint.save_interval=1", "--checkpoint.keep_last=0"]

    def from_(iteration: int) -> str:
        return f"--resume={tmp_path / 'whole' / 'checkpoints' / f'iter_{iteration:07}'}"

    override = '--model.fp8_overrides={"*:fprop": "bf16"}'
    commands = [
        [*common, f"--run_dir={tmp_path / 'whole'}", *parts, *saves],
        [*common, f"--run_dir={tmp_path / 'border'}", *parts, from_(3)],
        [*common, f"--run_dir={tmp_path / 'inside'}", *parts, from_(4)],
        [*common, f"--run_dir={tmp_path / 'override'}", override, from_(3)],
        ["report", str(tmp_path / "whole")],
    ]
    results = run_all(tmp_path, commands)
    assert [code for code, _ in results] == [0] * 5, results
    whole, border, inside, override_run = (
        lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "border", "inside", "override")
    )
    losses = [step["lm_loss"] for step in whole]
    assert [step["lm_loss"] for step in border] == losses[3:] == [s["lm_loss"] for s in override_run]
    assert [step["lm_loss"] for step in inside] == losses[4:]
    # Two layers of four linears, two microbatches; the output layer's three GEMMs are in BF16 throughout.
    assert [(s["fp8_gemms"], s["hp_gemms"]) for s in whole] == [(48, 6)] * 3 + [(32, 22)] * 3
    report = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert report["precision"]["phases"] == [
        {"phase": "fp8", "precision": "fp4", "first": 1, "last": 3},
        {"phase": "healing", "precision": "fp4", "first": 4, "last": 6, "parts": {"*:fprop": "bf16"}},
    ]
    assert "FP4 in iterations 1-3, FP4 with *:fprop in BF16 in iterations 4-6 (healing)" in format_report(
        report
    )
    assert read_run(tmp_path / "whole").phases == (
        ("fp8", "FP4", 1, 3),
        ("healing", "FP4 with *:fprop in BF16", 4, 6),
    )

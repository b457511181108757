"""High-precision warm-up and healing: BF16's own bits there, histories filled meanwhile, real scales at the switch."""

from __future__ import annotations

import contextlib
import io
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.support.fp8_gpt import MOE, SITES, Watched, digest, fp8_config, watched_gemms
from benchmarks.support.gpt import build_chunks, build_optimizer, train_step
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.mcore.iteration import iteration_counts, set_training_length
from megatron_fp8.mcore.runtime import state_of, unwrap
from megatron_fp8.mcore.sites import fp8_linears
from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec
from megatron_fp8.recipe import DelayedScaling
from tests.support.command import MODEL, lines, run_all
from tests.support.delayed import PlainSlot

ONE, TP_SP, PP = Layout(), Layout(tp=2, sp=True), Layout(pp=2)
SMALL = {"sequence": 64, "micro_batch": 2, "global_batch": 4}
EVALUATED = {**SMALL, "global_batch": 2}
MODEL_SIZE = {"hidden_size": 128, "ffn_hidden_size": 256}
WARM, LENGTH, HEAL = 3, 6, 1
PHASES = {"fp8_high_precision_warmup": WARM / LENGTH, "fp8_high_precision_healing": HEAL / LENGTH}
DELAYED = {"fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max", "fp8_margin": 1}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1, "recompute_method": "uniform"}

Amaxes = dict[str, float]


@dataclass
class Seen:
    """What one rank saw. ``amaxes``: by iteration, of slots by name; ``slots``: (scale, warm) when FP8 starts."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)
    amaxes: list[Amaxes] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    slots: dict[str, tuple[float, bool]] = field(default_factory=dict)
    said: str = ""


def trained(
    layout: Layout, recipe: str | None, fields: dict[str, Any], steps: int, watch: bool = False
) -> Seen:
    """A rank case: ``steps`` iterations, an evaluation before each; ``watch`` hooks on the linears see their tensors."""
    seen, watched, said = Seen(), Watched(), io.StringIO()
    with model_parallel(layout), watched_gemms(watched), contextlib.redirect_stdout(said):
        config = fp8_config(layout, recipe, **MODEL_SIZE, **fields)
        set_training_length(config, LENGTH)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64)
        optimizer = build_optimizer(config, chunks)
        if watch:
            watch_tensors(chunks, seen.amaxes)
        for step in range(steps):
            if step == WARM:
                seen.slots = {s.name: (s.scale.item(), s.warm) for s in state_of(config).slots()}
            before = watched.records
            evaluation = train_step(config, chunks, optimizer, 100 + step, forward_only=True, **EVALUATED)[0]
            assert watched.records == before, "an evaluation recorded an amax"
            seen.evaluations.append(evaluation)
            seen.amaxes.append({})
            seen.losses.append(train_step(config, chunks, optimizer, step, **SMALL)[0])
            seen.digests.append(digest(chunks))
            seen.counts.append(iteration_counts())
            seen.records.append(watched.records - before)
            if watch and step == WARM - 1:
                break
    seen.said = said.getvalue()
    return seen


def watch_tensors(chunks: list[Any], amaxes: list[Amaxes]) -> None:
    """The largest magnitude of every layer's linears' input, weight and output gradient, by hooks of torch alone."""

    def note(name: str, x: torch.Tensor) -> None:
        amaxes[-1][name] = max(amaxes[-1].get(name, 0.0), x.detach().float().abs().max().item())

    names = {
        id(module): f"decoder.layers.{layer.layer_number - 1}.{name}"
        for chunk in chunks
        for layer in unwrap(chunk).decoder.layers
        for name, module in layer.named_modules()
    }
    for linear in fp8_linears(chunks):
        name = names[id(linear)]

        def see(module: Any, args: Any, output: Any, name: str = name) -> None:
            if module.training:
                note(f"{name}.input", args[0])
                note(f"{name}.weight", module.weight)
                output[0].register_hook(lambda dy: note(f"{name}.grad_output", dy))

        linear.register_forward_hook(see)


def largest(everyone: list[Seen], iteration: int) -> Amaxes:
    """Over all ranks, as the amax reduction has it."""
    merged: Amaxes = {}
    for seen in everyone:
        for name, value in seen.amaxes[iteration].items():
            merged[name] = max(merged.get(name, 0.0), value)
    return merged


def plain_scales(everyone: list[Seen]) -> dict[str, float]:
    """Delayed scaling in plain Python over what the hooks saw in the warm-up's iterations."""
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="max", margin=1)
    slots = {
        name: PlainSlot(recipe, 57344.0 if name.endswith("grad_output") else 448.0)
        for name in largest(everyone, 0)
    }
    for iteration in range(WARM):
        for name, amax in largest(everyone, iteration).items():
            slots[name].update(amax, iteration)
    return {name: float(slot.scale) for name, slot in slots.items()}


def variants(layout: Layout, fields: dict[str, dict[str, Any]]) -> dict[str, Seen]:
    """A rank case: BF16 with hooks on its linears, and delayed scaling with phases, once for each entry of fields."""
    runs = {"bf16": trained(layout, None, {}, LENGTH, watch=True)}
    for name, more in fields.items():
        runs[name] = trained(layout, "delayed", {**PHASES, **DELAYED, **more}, LENGTH)
    return runs


@pytest.mark.parametrize(
    ("layout", "fields"),
    [(TP_SP, {"plain": {}, "full": FULL}), pytest.param(PP, {"plain": {}}, marks=pytest.mark.long)],
    ids=["tp2-sp", "pp2"],
)
def test_the_switch_starts_with_real_scales(ranks: RankPool, layout: Layout, fields: dict[str, Any]) -> None:
    """The warm-up has BF16's bits; the first FP8 iteration has the scales of plain Python on what BF16's tensors held."""
    everyone = ranks(2).run(variants, layout, fields)
    expected = plain_scales([runs["bf16"] for runs in everyone])
    assert len(expected) == 2 * len(SITES) * 3
    for runs in everyone:
        bf16 = runs.pop("bf16")
        for name, seen in runs.items():
            assert seen.losses[:WARM] == bf16.losses and seen.digests[:WARM] == bf16.digests, name
            assert seen.evaluations[:WARM] == bf16.evaluations, name
            assert seen.slots and all(warm for _, warm in seen.slots.values()), name
            assert {slot: scale for slot, (scale, _) in seen.slots.items()} == {
                slot: expected[slot] for slot in seen.slots
            }, name
            assert [c["fp8_gemms"] > 0 for c in seen.counts] == [False] * WARM + [True] * 2 + [False], name
            assert all(c["casts"] == 0 for c in [*seen.counts[:WARM], *seen.counts[-HEAL:]]), name
            # Amaxes are shared in the iteration's one collective (a stage of one rank has none) and nowhere else: no slot
            # was cold when FP8 started.
            assert {c["amax_collectives"] for c in seen.counts} == {1 if layout.tp > 1 else 0}, name
            assert all(c["scaling_collectives"] == 0 for c in seen.counts), name
            # Two microbatches' inputs and gradients and one weight for each linear, recomputed or not, in every phase.
            linears = len(seen.slots) // 3
            assert seen.records == [linears * (2 * 2 + 1)] * LENGTH, name
    first = everyone[0]["plain"].said.splitlines()
    assert first == [
        "megatron_fp8: FP8 from iteration 4 on, the warm-up in BF16 is over",
        "megatron_fp8: BF16 from iteration 6 on, FP8 is over",
    ]
    assert all(seen.said == "" for seen in everyone[1].values()), "the first rank speaks for all"


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [("mxfp8", {}), pytest.param("delayed", {**MOE, "moe_ffn_hidden_size": 128}, marks=pytest.mark.long)],
    ids=["mxfp8", "delayed-moe"],
)
def test_warm_up_is_bf16_to_the_bit(ranks: RankPool, recipe: str, fields: dict[str, Any]) -> None:
    bf16 = ranks(1).run(trained, ONE, None, fields, WARM)[0]
    seen = ranks(1).run(trained, ONE, recipe, {**PHASES, **fields}, WARM + 1)[0]
    assert seen.losses[:WARM] == bf16.losses and seen.digests[:WARM] == bf16.digests
    assert seen.evaluations[:WARM] == bf16.evaluations
    assert seen.counts[WARM]["fp8_gemms"] > 0
    if recipe == "delayed":
        assert all(warm for _, warm in seen.slots.values())
    else:
        assert seen.records[:WARM] == [0] * WARM, "there is no history to fill"


def without_length() -> str:
    """A rank case: what a model with a warm-up, and no training length, says."""
    with model_parallel():
        config = fp8_config(ONE, "delayed", **MODEL_SIZE, fp8_high_precision_warmup=0.5)
        chunks = build_chunks(config, spec=get_gpt_layer_fp8_spec, sequence=64)
        with pytest.raises(ValueError) as error:
            train_step(config, chunks, build_optimizer(config, chunks), 0, **SMALL)
    return str(error.value)


def test_a_fraction_of_an_unknown_length_is_an_error(ranks: RankPool) -> None:
    said = ranks(1).run(without_length)[0]
    assert "fp8_high_precision_warmup=0.5" in said and "set_training_length(config, iterations)" in said


# ------------------------------------------------------------------------------------------------------------- the app


def test_the_app_knows_the_length(tmp_path: Path) -> None:
    """By its options alone: the phases are in the report, FP8 GEMMs in the middle only, and BF16's losses before them.

    A run that is resumed in the warm-up, with half-filled histories, goes on bit by bit.
    """
    text = tmp_path / "text.txt"
    words = random.Random(0).choices(["spam", "eggs", "ham", "toast", "tea", "\n"], k=60_000)
    text.write_text(" ".join(words))
    config = tmp_path / "run.yaml"
    model = {**MODEL, "num_layers": 2, "first_last_layers_bf16": False}
    del model["num_layers_at_start_in_bf16"]
    content = {
        "model": model,
        "train": {"train_iters": 8, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64},
        "data": {"paths": [str(text)], "split": "80,20,0", "cache_dir": str(tmp_path / "cache")},
    }
    config.write_text(json.dumps(content))  # JSON is YAML
    phases = ["--model.fp8_high_precision_warmup=0.25", "--model.fp8_high_precision_healing=0.125"]
    common = ["train", f"--config={config}"]
    saves = ["--checkpoint.save_interval=1", "--checkpoint.keep_last=0"]
    first = tmp_path / "fp8" / "checkpoints" / "iter_0000001"
    commands = [
        [*common, f"--run_dir={tmp_path / 'fp8'}", *phases, *saves],
        [*common, f"--run_dir={tmp_path / 'bf16'}", "--model.fp8=null"],
        [*common, f"--run_dir={tmp_path / 'none'}", *phases, "--train.train_iters=1"],
        ["report", str(tmp_path / "fp8")],
        [*common, f"--run_dir={tmp_path / 'resumed'}", *phases, f"--resume={first}"],
    ]
    results = run_all(tmp_path, commands)
    assert [code for code, _ in results] == [0, 0, 2, 0, 0], results
    assert "leave none of 1 iterations to FP8" in results[2][1]
    ours, bf16 = (lines(tmp_path / name / "metrics.jsonl") for name in ("fp8", "bf16"))
    assert [step["fp8_gemms"] > 0 for step in ours] == [False] * 2 + [True] * 5 + [False]
    resumed = lines(tmp_path / "resumed" / "metrics.jsonl")
    assert [step["lm_loss"] for step in resumed] == [step["lm_loss"] for step in ours[1:]]
    same = [mine["lm_loss"] == theirs["lm_loss"] for mine, theirs in zip(ours, bf16, strict=True)]
    assert same[:2] == [True] * 2 and not all(same)
    report = json.loads((tmp_path / "fp8" / "report.json").read_text())
    expected = [
        {"phase": "warm-up", "precision": "bf16", "first": 1, "last": 2},
        {"phase": "fp8", "precision": "fp8", "first": 3, "last": 7},
        {"phase": "healing", "precision": "bf16", "first": 8, "last": 8},
    ]
    assert report["precision"]["phases"] == expected
    assert all(s["phases"] == (expected if s["precision"] == "fp8" else []) for s in report["sites"])

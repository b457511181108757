"""Figures and verdicts of comparisons whose losses are made up, so that the words can be held against them."""

import json
import re
import statistics
from types import SimpleNamespace

import pytest

from megatron_fp8.study import StudyFailed
from megatron_fp8.study.compare_results import (
    Outcome,
    as_table,
    band_of,
    band_percent,
    conclusion,
    draw,
    read_outcome,
    rows_of,
)
from tests.support.run_folders import write_run


def outcome(recipe, seed, loss, fp8_gemms=24, **more):
    given = {
        "folder": "x", "losses": [loss + 1, None, loss + 0.5, loss], "tokens_per_s": 100.0, "saved_bytes": 2**20,
        "peak_bytes": 2**30, "fp8_gemms": 0 if recipe == "bf16" else fp8_gemms, "hp_gemms": 3, "skipped": 1,
    }  # fmt: skip
    return Outcome(recipe=recipe, seed=seed, loss=loss, **{**given, **more})


BF16 = [outcome("bf16", 1, 2.0), outcome("bf16", 2, 2.1), outcome("bf16", 3, 2.04)]


def with_differences(*differences):
    """The row of a recipe that ends so far from BF16's three seeds."""
    runs = [outcome("mxfp8", run.seed, run.loss + d) for run, d in zip(BF16, differences, strict=True)]
    (row,) = (row for row in rows_of([*BF16, *runs]) if row.recipe == "mxfp8")
    return row


def test_losses_are_paired_by_seed():
    row, band = with_differences(0.01, 0.03, 0.02), band_of(BF16)
    assert (band.seeds, band.spread) == (3, pytest.approx(0.1))
    assert band.deviation == pytest.approx(statistics.stdev([2.0, 2.1, 2.04]))
    assert row.differences == pytest.approx([0.01, 0.03, 0.02]) and row.deviation == pytest.approx(0.01)
    assert row.relative == pytest.approx(0.02 / band.mean) and row.skipped == 3


@pytest.mark.parametrize(
    "differences, words",
    [
        (
            (0.01, -0.03, 0.02),
            "mxfp8 is no further from bf16 than bf16's seeds are from each other: +0.0000 nats",
        ),
        ((0.01, 0.03, 0.02), "+0.0200 nats (+0.98%) on average, +0.0100 to +0.0300 by seed"),
        ((0.01, 0.03, 0.02), "; bf16's own 3 seeds lie 0.1000 apart. It is worse with every seed."),
        ((-0.01, -0.03, -0.02), "no further from bf16 than .* It is better with every seed."),
        ((0.2, 0.3, 0.4), "mxfp8 is worse than bf16 with every seed: +0.3000 nats"),
        ((-0.2, 0.3, 0.4), "mxfp8 is undecided: .* More --seeds may tell."),
        ((0.0, 0.0, 0.0), "equals bf16 to the last bit"),
    ],
)
def test_the_verdict_says_what_the_differences_show(differences, words):
    said = with_differences(*differences).verdict
    assert re.search(re.escape(words).replace(r"\.\*", ".*"), said) and said.endswith(".")
    kinds = ("no further from", "is worse than", "is better than", "undecided", "equals")
    assert sum(kind in said for kind in kinds) == 1


def test_one_seed_may_be_chance():
    rows = rows_of([BF16[0], outcome("mxfp8", 1, 2.5)])
    assert "With one seed that may be chance" in rows[1].verdict and rows[1].deviation is None
    assert not any(word in rows[1].verdict for word in ("further", "worse", "better"))


def test_the_conclusion_names_few_seeds_and_emulation():
    rows, band = rows_of(BF16), band_of(BF16)
    assert "3 seeds give a rough idea of what chance does" in conclusion(rows, band, "CPU x86_64, 2 cores")
    assert "emulated on a CPU" in conclusion(rows, band, "CPU x86_64, 2 cores")
    assert "emulated" not in conclusion(rows, band, "NVIDIA H100")


def test_the_table_and_the_picture(tmp_path):
    from dataclasses import asdict

    runs = [*BF16, *(outcome("mxfp8", run.seed, run.loss + 0.02, tokens_per_s=150.0) for run in BF16)]
    content = {
        "band": asdict(band_of(runs)), "recipes": [asdict(row) for row in rows_of(runs)],
        "runs": [asdict(run) for run in runs], "bigram_entropy": 2.4, "loss": "validation",
    }  # fmt: skip
    losses, cost = (part.splitlines() for part in as_table(content).split("\n\n"))
    assert len(losses) == len(cost) == 4 and "+0.0200 (+0.98%)" in losses[3]
    assert " 1.50 " in cost[3] and " 1.0 " in cost[3]
    large = [outcome(name, 1, 10.0, tokens_per_s=1e7, saved_bytes=2**38, peak_bytes=2**38, fp8_gemms=10**4)
             for name in ("bf16", "tensorwise")]  # fmt: skip
    large = {
        "band": asdict(band_of(large)), "recipes": [asdict(row) for row in rows_of(large)],
        "runs": [asdict(run) for run in large],
    }  # fmt: skip
    assert max(map(len, as_table(large).splitlines())) <= 80
    assert "noisy" not in cost[3]
    noisy = {**content, "runs": [*content["runs"], asdict(outcome("mxfp8", 9, 2.0, tokens_per_s=166.0))]}
    assert " 150 (noisy) " in as_table(noisy).splitlines()[-1]
    draw(content, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert band_percent(content) == pytest.approx(100 * 0.1 / content["band"]["mean"]), "the verdict's spread"


def left(folder, loss=2.5):
    """A run's folder, whose only validation has this loss."""
    write_run(folder, every=0)
    (folder / "validation.jsonl").write_text(json.dumps({"iteration": 40, "validation_loss": loss}) + "\n")
    config = SimpleNamespace(train=SimpleNamespace(eval_iters=1))
    return SimpleNamespace(folder=folder, recipe="bf16", seed=1, name="bf16, seed 1", config=config)


def test_figures_are_read(tmp_path):
    found = read_outcome(left(tmp_path / "run"))
    assert found.loss == 2.5 and len(found.losses) == 40 and found.peak_bytes > 0


@pytest.mark.parametrize(
    "name, value",
    [("skipped", ...), ("tokens_per_s", 0), ("peak_memory", -1), ("fp8_gemms", None), ("hp_gemms", "NaN")],
)
def test_a_figure_that_is_missing_or_impossible_is_refused(tmp_path, name, value):
    run = left(tmp_path / "run")
    path = run.folder / "metrics.jsonl"
    *lines, last = map(json.loads, path.read_text().splitlines())
    last = {key: inner for key, inner in {**last, name: value}.items() if inner is not ...}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, last]))
    with pytest.raises(
        ValueError, match=rf"line 40 of .*metrics\.jsonl' has {name} .*, and that is a number"
    ):
        read_outcome(run)


def test_a_wrong_line_is_refused_and_a_loss_that_is_not_finite_is_a_failure(tmp_path):
    with pytest.raises(ValueError, match=r"line 1 of .*validation\.jsonl"):
        read_outcome(left(tmp_path / "one", loss="x"))
    with pytest.raises(StudyFailed, match="without a finite loss"):
        read_outcome(left(tmp_path / "two", loss=None))

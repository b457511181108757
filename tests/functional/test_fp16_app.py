"""`megatron-fp8 train` in FP16: the scale in metrics, checkpoint and report, a resumed run, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fp8.train.report import format_report
from tests.support.command import MEASURED, MODEL, lines, run_all

OPTIONS = [
    "--model.fp16=true", "--optimizer.use_distributed_optimizer=true", "--optimizer.initial_loss_scale=4194304",
    "--optimizer.hysteresis=1", "--optimizer.loss_scale_window=2",
]  # fmt: skip
WARM = ["--train.train_iters=10", "--model.fp8_high_precision_warmup=0.9"]
REFUSED = {
    "--model.fp16=true --model.bf16=true": "model.fp16=true and model.bf16=true",
    "--model.fp16=true --model.params_dtype=bfloat16": "model.params_dtype='bfloat16' with model.fp16=true",
    "--model.fp16=true --model.fp8_param=true": "fp8_param=True, model.bf16=False, model.fp16=True",
    "--model.fp16=true --optimizer.max_loss_scale=.inf": "max_loss_scale=inf",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: Any) -> tuple[Path, list[tuple[int, str]]]:
    """Folder of the runs, and (exit code, stderr) of the commands below: the last ones are what is refused."""
    folder = tmp_path_factory.mktemp("fp16")
    words = random.Random(0).choices(["spam", "eggs", "ham", "toast", "tea", "\n"], k=20_000)
    (folder / "text.txt").write_text(" ".join(words))
    content = {
        "model": {**MODEL, "num_layers": 2, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0},
        "train": {
            "train_iters": 8, "micro_batch_size": 2, "global_batch_size": 2, "seq_length": 32, "eval_iters": 0,
            "threads": 1, "log_interval": 1,
        },
        "data": {"paths": [str(folder / "text.txt")], "split": "1,0,0", "cache_dir": str(folder / "cache")},
        "checkpoint": {"save_interval": 4, "keep_last": 0},
    }  # fmt: skip
    (folder / "small.yaml").write_text(yaml.safe_dump(content))
    start = ["train", f"--config={folder / 'small.yaml'}"]
    fourth = f"--resume={folder / 'whole/checkpoints/iter_0000004'}"
    of_bf16 = f"--resume={folder / 'bf16/checkpoints/iter_0000008'}"
    commands = [
        [*start, *OPTIONS, f"--run_dir={folder / 'whole'}"],
        [*start, *OPTIONS, f"--run_dir={folder / 'again'}", fourth],
        [*start, f"--run_dir={folder / 'bf16'}", fourth],
        [*start, *OPTIONS, *WARM, f"--run_dir={folder / 'fp16 again'}", of_bf16],
        [
            *start,
            "--model.fp16=true",
            "--optimizer.loss_scale=512",
            "--train.train_iters=3",
            f"--run_dir={folder / 'constant'}",
        ],
        *([*start, *options.split(), f"--run_dir={folder / 'refused'}"] for options in REFUSED),
    ]
    return folder, run_all(folder, commands)


def test_scale_and_skipped_steps_are_in_the_metrics(results: Any) -> None:
    folder, outcomes = results
    assert outcomes[0] == (0, "")
    metrics = lines(folder / "whole" / "metrics.jsonl")
    scale, clean = 2.0**22, 0
    for line in metrics:
        assert line["loss_scale"] == scale
        clean = 0 if line["skipped"] else clean + 1
        assert (line["grad_norm"] is None) == bool(line["skipped"])
        scale = scale / 2 if line["skipped"] else scale * 2 if clean == 2 else scale
        clean %= 2
    skipped = [line["skipped"] for line in metrics]
    assert 0 < sum(skipped) < 8, skipped
    rates = [line["learning_rate"] for line in metrics]
    assert all((a == b) == bool(s) for a, b, s in zip(rates, rates[1:], skipped, strict=False)), (
        "the schedule waits"
    )
    losses = [line["lm_loss"] for line in metrics]
    assert losses[-1] < losses[0]
    manifest = json.loads((folder / "whole/checkpoints/iter_0000008/manifest.json").read_text())
    saved = manifest["state"]["loss_scaler"]
    assert saved["scale"] == scale and saved["skipped"] == sum(skipped)
    report = json.loads((folder / "whole" / "report.json").read_text())
    assert report["precision"]["fp16"] and not report["precision"]["bf16"]
    assert {site["precision"] for site in report["sites"]} == {"fp8", "fp16"}
    text = format_report(report)
    assert "FP8 hybrid, recipe delayed over FP16, with a loss scale" in text
    assert "layer 0            fp16: first_last_layers_bf16" in text


def test_a_resumed_run_is_the_uninterrupted_one(results: Any) -> None:
    folder, outcomes = results
    assert outcomes[1] == (0, "")
    whole = lines(folder / "whole" / "metrics.jsonl")[4:]
    again = lines(folder / "again" / "metrics.jsonl")
    for one, other in zip(whole, again, strict=True):
        assert {k: v for k, v in one.items() if k not in MEASURED} == {
            k: v for k, v in other.items() if k not in MEASURED
        }


def test_bf16_drops_the_scale_and_fp16_starts_with_its_own(results: Any) -> None:
    folder, outcomes = results
    assert outcomes[2:4] == [(0, "")] * 2
    bf16, fp16 = (lines(folder / name / "metrics.jsonl") for name in ("bf16", "fp16 again"))
    assert [line["iteration"] for line in bf16] == [5, 6, 7, 8] and [line["iteration"] for line in fp16] == [
        9,
        10,
    ]
    assert [line["loss_scale"] for line in bf16] == [None] * 4 and fp16[0]["loss_scale"] == 2.0**22
    assert [line["fp8_gemms"] > 0 for line in fp16] == [False, True]
    report = json.loads((folder / "fp16 again" / "report.json").read_text())
    assert [phase["precision"] for phase in report["precision"]["phases"]] == ["fp16", "fp8"]


def test_a_constant_scale_stays(results: Any) -> None:
    folder, outcomes = results
    assert outcomes[4] == (0, "")
    metrics = lines(folder / "constant" / "metrics.jsonl")
    assert [(line["loss_scale"], line["skipped"]) for line in metrics] == [(512.0, 0)] * 3
    assert metrics[-1]["lm_loss"] < metrics[0]["lm_loss"]


def test_what_does_not_fit_is_refused_with_its_name(results: Any) -> None:
    folder, outcomes = results
    for (options, said), (code, error) in zip(REFUSED.items(), outcomes[5:], strict=True):
        assert code == 2 and said in error and error.count("\n") == 1, (options, error)
    assert not (folder / "refused").exists()

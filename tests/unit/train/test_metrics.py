"""What is recorded: JSON that is JSON, lines that are whole, and the arithmetic of FLOPs."""

import json
import math
import sys
from dataclasses import replace

import pytest

from megatron_fp8.train.metrics import Display, IterationMetrics, MetricsWriter, finite, model_flops_per_token
from megatron_fp8.train.report import format_report
from tests.support.terminal import LIKE_MARKUP, Terminal

STEP = IterationMetrics(
    iteration=1, lm_loss=2.5, grad_norm=1.0, learning_rate=1e-3, tokens=64, tokens_per_s=10.0, mfu=None,
    skipped=0, loss_scale=None, nonfinite=0, fp8_gemms=3, hp_gemms=4, amax_collectives=1, peak_memory=1 << 20,
)  # fmt: skip


def test_numbers_that_are_not_finite_become_null():
    assert [finite(x) for x in (1.5, None, math.nan, math.inf, -math.inf)] == [1.5, None, None, None, None]


def test_each_iteration_is_on_disk_at_once_and_valid_json(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.iteration(STEP)
    writer.iteration(replace(STEP, iteration=2, lm_loss=None, grad_norm=None, skipped=1))
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["lm_loss"] for line in read] == [2.5, None]
    writer.event(2, "save", "iter_0000002")
    event = {"iteration": 2, "event": "save", "text": "iter_0000002"}
    assert json.loads((tmp_path / "events.jsonl").read_text()) == event
    writer.validation(2, math.nan)
    assert json.loads((tmp_path / "validation.jsonl").read_text()) == {
        "iteration": 2,
        "validation_loss": None,
    }
    with pytest.raises(ValueError):
        writer.iteration(replace(STEP, learning_rate=math.nan))
    writer.close()
    assert list((tmp_path / "tensorboard").iterdir())


def test_lines_count_skipped_steps(capsys):
    display = Display(iterations=3, log_interval=2)
    for iteration, skipped in ((1, 0), (2, 1), (3, 0)):
        loss = None if skipped else 2.0
        display.iteration(replace(STEP, iteration=iteration, skipped=skipped, lm_loss=loss, mfu=0.5))
    display.close()
    first, second, third = capsys.readouterr().out.splitlines()
    assert "loss 2.0000" in first and "skipped 0" in first and "MFU 50.0%" in first
    assert "loss not finite" in second and "skipped 1" in second
    assert "skipped 1" in third


def test_lines_show_the_loss_scale_and_go_on_counting(capsys):
    display = Display(iterations=9, log_interval=2, finished=6, skipped=4)
    for iteration, skipped, scale in ((7, 1, 65536.0), (8, 0, 2.0**32)):
        display.iteration(replace(STEP, iteration=iteration, skipped=skipped, loss_scale=scale))
    display.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "skipped 5" in first and "loss scale 65,536" in first
    assert "skipped 5" in second and "loss scale 4.29497e+09" in second


def test_a_line_above_the_bar_is_as_it_was_written(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    display = Display(iterations=3, log_interval=1)
    display.say(LIKE_MARKUP)
    display.iteration(STEP)
    written = sys.stdout
    display.close()
    assert LIKE_MARKUP in written.getvalue() and "loss 2.5" in written.getvalue()


def test_flops_are_6_for_each_weight_and_token_and_those_of_causal_attention():
    # One layer, hidden 4, 10 weights in it, 8 rows of vocabulary, 6 tokens: QK^T and PV take 2 x 2 x 4 FLOPs
    # for each of the 3 tokens that are seen on average, and three times that with the backward pass.
    assert model_flops_per_token(10, 8, 4, 1, 6) == 6 * 10 + 6 * 8 * 4 + 3 * (2 * 2 * 4) * 3


def test_the_precision_map_joins_layers_that_are_alike():
    def site(layer, precision, recipe=None):
        return {
            "name": f"{layer}", "layer": layer, "precision": precision, "recipe": recipe, "backend": None, "reason": "so",
        }  # fmt: skip

    sites = [
        site(0, "bf16"),
        *(site(n, "fp8", "mxfp8") for n in (1, 1, 2, 2)),
        site(3, "bf16"),
        site(None, "bf16"),
    ]
    report = {
        "device": "CPU", "versions": {"python": "3"}, "parameters": {"total": 1000, "non_embedding": 10},
        "parallel": {
            "world_size": 2, "launcher": "torchrun", "backend": "gloo", "tensor": 2, "pipeline": 1, "context": 1,
            "virtual_pipeline": None, "expert": 1, "data": 1, "sequence_parallel": True, "threads_per_rank": 1,
        },
        "precision": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8"},
        "sites": sites,
    }  # fmt: skip
    shown = format_report(report).splitlines()
    assert [line.split("  ")[1].strip() for line in shown if line.startswith("  ")] == [
        "layer 0", "layer 1-2", "layer 3", "outside the layers bf16: so",
    ]  # fmt: skip
    assert "tensor 2, sequence parallel" in format_report(report)
    assert "1,000 total" in format_report(report)

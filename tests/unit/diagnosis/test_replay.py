"""Whether a replay is what the run computed: scales of shards, and the losses that the run recorded."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp8.diagnosis.diagnosis import Diagnosis
from megatron_fp8.diagnosis.override_search import Remedy
from megatron_fp8.diagnosis.replay import Replay, other_shards, recorded_loss
from megatron_fp8.recipe import RECIPES

LAYOUT = {"tensor": 2, "pipeline": 2, "context": 1, "expert": 1, "data": 4}


def _shards(recipe: str = "tensorwise", saved: Any = LAYOUT, tensor: int = 1) -> str | None:
    model = SimpleNamespace(
        tensor_model_parallel_size=tensor, context_parallel_size=1, expert_model_parallel_size=1
    )
    plans: Any = [SimpleNamespace(recipe=RECIPES[recipe]()), SimpleNamespace(recipe=None)]
    return other_shards(saved, model, plans)


def test_scales_of_shards_differ_where_a_recipe_makes_them_of_the_shard():
    differ = {recipe for recipe in RECIPES if recipe != "custom" and _shards(recipe) is not None}
    assert differ == {"tensorwise", "rowwise", "nvfp4"}
    assert _shards(tensor=2) is None and _shards(saved={}) is None, "the run's own layout, an unknown one"
    line = _shards() or ""
    assert "tensor 1 and not 2" in line and "megatron-fp8 launch --ranks 4 diagnose" in line
    experts = _shards(saved={**LAYOUT, "expert": 2}) or ""
    assert "--ranks 16" in experts, "experts are on data-parallel ranks"


def test_the_recorded_loss_is_of_the_iteration_and_of_the_run_as_it_ran(tmp_path):
    rows = [{"iteration": 1, "lm_loss": 3.5}, {"iteration": 2, "lm_loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"fp8": "hybrid"}
    assert recorded_loss(tmp_path, 1, model, []) == 3.5
    assert recorded_loss(tmp_path, 1, model, ["--model.tensor_model_parallel_size=2"]) == 3.5
    assert recorded_loss(tmp_path, 1, model, ["--model.fp8_pow2_scales=true"]) is None
    assert recorded_loss(tmp_path, 1, {"fp8": None}, []) is None
    assert recorded_loss(tmp_path, 1, {"fp8": None, "fp4": "e2m1"}, []) == 3.5
    assert recorded_loss(tmp_path, 1, {**model, "fp8_high_precision_warmup": 0.1}, []) is None
    assert recorded_loss(tmp_path, 2, model, []) is None and recorded_loss(tmp_path, 3, model, []) is None


def _replay(recorded=None, *, folder=None, iteration=10) -> Replay:
    nothing: Any = None
    return Replay(nothing, nothing, folder, iteration, 11, [], recorded)


def test_a_verdict_begins_with_a_loss_that_is_not_the_run_s():
    measured: Any = SimpleNamespace(planned=SimpleNamespace(losses=(3.6,)))
    found = Diagnosis([], {}, "All is well.", True, (3.5, 3.6, 3.7), 0.0, 4, measured, Remedy())
    assert _replay(3.55).with_recorded_loss(found) is found
    other = _replay(0.5313).with_recorded_loss(found)
    assert other.verdict.startswith("This is not what the run computed")
    assert "of iteration 11 is 3.6, and the run recorded 0.5313" in other.verdict
    assert found.verdict in other.verdict and not other.clean


def test_the_good_loss_is_the_best_of_ten_and_leaves_out_what_is_no_number(tmp_path):
    losses = [5.0, '"NaN"', None, '"Infinity"', *[3.0] * 9, *[2.0] * 10, 1.0]
    lines = [f'{{"iteration": {i}, "lm_loss": {json.dumps(x) if not isinstance(x, str) else x}}}\n'
             for i, x in enumerate(losses, 1)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(lines))

    def good_loss(iteration):
        return _replay(folder=tmp_path / "checkpoints" / "iter", iteration=iteration).good_loss()

    assert good_loss(12) is None, "nine losses"
    assert good_loss(13) == pytest.approx(3.2) and good_loss(23) == 2.0

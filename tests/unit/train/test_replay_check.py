"""Whether a replay is what the run computed: scales of shards, and the loss that the run recorded."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fp8.recipe import RECIPES
from megatron_fp8.train.replay_check import is_near, other_shards, recorded_loss, unlike

LAYOUT = {"tensor": 2, "pipeline": 2, "context": 1, "expert": 1, "data": 4}


def _shards(recipe: str = "tensorwise", options: tuple[str, ...] = (), saved: Any = LAYOUT, tensor: int = 1):
    model = SimpleNamespace(
        tensor_model_parallel_size=tensor, context_parallel_size=1, expert_model_parallel_size=1
    )
    plans: Any = [SimpleNamespace(recipe=RECIPES[recipe]()), SimpleNamespace(recipe=None)]
    return other_shards(saved, model, plans, options)


@pytest.mark.parametrize(
    ("recipe", "differs"),
    [("tensorwise", True), ("rowwise", True), ("delayed", False), ("blockwise", False), ("mxfp8", False)],
)
def test_scales_of_shards_differ_where_a_recipe_makes_them_of_the_shard(recipe, differs):
    assert (_shards(recipe) is not None) == differs


def test_the_refusal_has_the_command_of_the_run_s_layout_and_the_way_around():
    shards = _shards()
    said = str(shards.refusal("runs/x --iteration 3", "; the loss differs"))
    assert "tensor 1 and not 2" in said and "; the loss differs." in said
    assert "megatron-fp8 launch --ranks 4 diagnose runs/x --iteration 3;" in said
    assert "--model.tensor_model_parallel_size=1" in said and not shards.asked
    assert _shards(options=("--model.tensor_model_parallel_size=1",)).asked
    assert _shards(saved={**LAYOUT, "expert": 2}).ranks == 16, "experts are on data-parallel ranks"


def test_the_run_s_own_layout_and_one_that_is_not_known_are_no_other():
    assert _shards(tensor=2) is None and _shards(saved={}) is None


def test_the_recorded_loss_is_of_the_iteration_and_of_the_run_as_it_ran(tmp_path):
    rows = [{"iteration": 1, "lm_loss": 3.5}, {"iteration": 2, "lm_loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"fp8": "hybrid"}
    assert recorded_loss(tmp_path, 1, model, []) == 3.5
    assert recorded_loss(tmp_path, 1, model, ["--model.tensor_model_parallel_size=2"]) == 3.5
    assert recorded_loss(tmp_path, 1, model, ["--model.fp8_pow2_scales=true"]) is None
    assert recorded_loss(tmp_path, 1, {"fp8": None}, []) is None
    assert recorded_loss(tmp_path, 1, {**model, "fp8_high_precision_warmup": 0.1}, []) is None
    assert recorded_loss(tmp_path, 2, model, []) is None and recorded_loss(tmp_path, 3, model, []) is None


def test_a_loss_far_from_the_recorded_one_is_said_with_both():
    assert is_near(0.532, 0.5313) and is_near(0.6, 0.5313, spread=0.05) and not is_near(3.6, 0.5313, 0.05)
    assert unlike(0.532, 0.5313, 11, 0.0) == ""
    said = unlike(3.596, 0.5313, 11, 0.05)
    assert said.startswith("This is not what the run computed")
    assert "of iteration 11 is 3.596" in said and "recorded 0.5313" in said

"""Resuming is exact: save, build another model, load, go on: every loss and every bit as without the interruption."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from benchmarks.support import gpt
from benchmarks.support.fp8_gpt import DEEPSEEK, NARROW
from benchmarks.support.ranks import Layout, model_parallel
from tests.support.long_cases import some
from tests.support.resume import Training, resumes_exactly

DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
HISTORY: dict[str, Any] = {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
ONE: dict[str, Any] = {"num_layers": 1}  # where BF16 or delayed scaling does the same with two
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}


CASES: dict[str, tuple[Any, ...]] = {
    "bf16-tp2-sp": (Layout(tp=2, sp=True), None, DROPOUT, {}),
    "delayed-dp2-sharded": (Layout(), "delayed", {**DROPOUT, **HISTORY}, SHARDED),
    "delayed-tp2-sp": (Layout(tp=2, sp=True), "delayed", {**DROPOUT, **HISTORY}, {}),
    "delayed-fp8-weights-pp2": (Layout(pp=2), "delayed", {"fp8_param": True, **HISTORY}, {}),
    "delayed-fp8-weights-overlap": (Layout(), "delayed", {**HISTORY, "fp8_param": True}, OVERLAP),
    "mxfp8-fp8-weights-overlap": (Layout(), "mxfp8", {"fp8_param": True}, OVERLAP),
    "mxfp8-overlap": (Layout(), "mxfp8", ONE, OVERLAP),
    "delayed-dp2-history-1": (Layout(), "delayed", {**DROPOUT, **ONE}, SHARDED),
    "delayed-dp2-own-histories": (Layout(), "delayed", {**HISTORY, **ONE, "tp_only_amax_red": True}, SHARDED),
    "delayed-interval": (Layout(), "delayed", {**DROPOUT, **HISTORY, **ONE, "fp8_interval": 2}, {}),
    "tensorwise-stochastic": (Layout(), "tensorwise", {**ONE, "fp8_stochastic_rounding": True}, SHARDED),
    "delayed-vpp2-first-last-bf16": (
        Layout(pp=2, vpp=2),
        "delayed",
        {**DROPOUT, **HISTORY, "num_layers": 4, "first_last_layers_bf16": True},
        {},
    ),
    "nvfp4-fp4-weights-overlap": (Layout(), "nvfp4", {"fp4_param": True}, OVERLAP),
    "nvfp4-fp4-weights-tp2-sp": (Layout(tp=2, sp=True), "nvfp4", {"fp4_param": True, **ONE}, SHARDED),
    "nvfp4-tp2-sp": (Layout(tp=2, sp=True), "nvfp4", ONE, {}),
    "tensorwise-cp2": (Layout(cp=2), "tensorwise", ONE, SHARDED),
    "delayed-deepseek-ep2": (Layout(ep=2), "delayed", {**HISTORY, **DEEPSEEK}, SHARDED),
    # An embedding that stages share has a bucket of its own, after one that is padded.
    "delayed-deepseek-pp2": (Layout(pp=2), "delayed", {**HISTORY, **DEEPSEEK}, SHARDED),
}
"""Without FP8 weights only delayed scaling has a state of its own; each other recipe is in one case below."""
for _recipe in ("tensorwise", "rowwise", "blockwise"):
    CASES[f"{_recipe}-fp8-weights-dp2-sharded"] = (Layout(), _recipe, {"fp8_param": True, **ONE}, SHARDED)
BACK = (
    *("delayed-dp2-own-histories", "delayed-tp2-sp", "delayed-vpp2-first-last-bf16"),
    *("delayed-fp8-weights-overlap", "mxfp8-fp8-weights-overlap", "delayed-deepseek-ep2"),
    "nvfp4-fp4-weights-overlap",
)
HERE = (
    *("bf16-tp2-sp", "delayed-interval", "tensorwise-stochastic", "tensorwise-cp2"),
    *("tensorwise-fp8-weights-dp2-sharded", *BACK),
)
"""Each parallelism, and each kind of state that is saved."""


@pytest.mark.parametrize("name", some(CASES, *HERE))
def test_a_resumed_run_is_the_uninterrupted_one(ranks, tmp_path, name):
    """Of BACK also in the same model, after other iterations, as train.rewind_on_spike goes back."""
    layout, recipe, fields, ddp = CASES[name]
    if layout.tp == 1:
        fields = {**NARROW, **fields}
    case = (layout, recipe, fields, ddp, str(tmp_path))
    wanted = {"anew": {}, **({"back": {}} if name in BACK else {})}
    assert ranks(2).run(resumes_exactly, *case, back=name in BACK) == [wanted] * 2


@pytest.mark.parametrize(
    "ddp", [pytest.param({}, marks=pytest.mark.long), SHARDED], ids=["dp2", "dp2-sharded"]
)
def test_compact_moments_resume_exactly_too(ranks, tmp_path, ddp):
    """They are stored in float32, and become the same codes again."""
    case = (Layout(), "tensorwise", {**NARROW, **ONE}, ddp, str(tmp_path))
    assert ranks(2).run(resumes_exactly, *case, compact=True) == [{"anew": {}}] * 2


def test_an_asynchronous_save_holds_the_iteration_it_was_made_after(ranks, tmp_path):
    """Two more iterations run while the files are being written."""
    case = (Layout(), "delayed", {**DROPOUT, **HISTORY, **ONE}, SHARDED, str(tmp_path))
    assert ranks(2).run(resumes_exactly, *case, asynchronous=True) == [{"anew": {}}] * 2


def test_a_rank_that_has_no_part_of_a_parameter_group_saves_after_it_was_resumed(ranks, tmp_path):
    """Of many data-parallel ranks most hold no norm's weight."""
    holding, not_holding = ranks(2).run(saves_once_more, str(tmp_path))
    assert (holding, not_holding) == ((True, [2, 3, 3]), (False, [2, 3, 3]))


def saves_once_more(folder: str) -> tuple[bool, list[int]]:
    """A rank case: whether it holds something of each group; steps as saved at first, by a model that loaded and
    stepped, and by one that went back and stepped."""
    from megatron_fp8.mcore.checkpoint import numbers

    with model_parallel():
        fields = {"hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_layers": 1}
        first, other = (
            Training(
                Layout(),
                "tensorwise",
                fields,
                SHARDED,
                seed,
                tied=True,
                sequence=64,
                micro_batch=1,
                global_batch=2,
            )
            for seed in (1, 2)
        )
        first.steps(2)
        checkpoint, steps = first.save(folder), []
        for training in (first, other, first):
            if steps:
                training.load(checkpoint)
                training.steps(1)
            steps.append(numbers(training.chunks, training.optimizer)["optimizer_step"])
        return all(group["params"] for group in first.optimizer.param_groups), steps


@pytest.mark.parametrize("ddp", [pytest.param({}, marks=pytest.mark.long), SHARDED], ids=["plain", "sharded"])
def test_a_frozen_first_stage_knows_how_often_the_others_stepped(ranks, tmp_path, ddp):
    """Its rank writes the manifest. Without the step Adam would correct its moments as in the first one."""
    assert ranks(2).run(resumes_frozen, str(tmp_path), ddp) == [{"anew": {}}] * 2


def resumes_frozen(folder: str, ddp: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state

    initialise = gpt.initialise

    def frozen(model: Any, config: Any, seed: int) -> None:
        initialise(model, config, seed)
        model.requires_grad_(not parallel_state.is_pipeline_first_stage())

    with mock.patch.object(gpt, "initialise", frozen):
        return resumes_exactly(Layout(pp=2), "tensorwise", NARROW, ddp, folder)

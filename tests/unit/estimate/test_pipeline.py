"""Microbatches in flight, by hand."""

from __future__ import annotations

import dataclasses

from megatron_fp8.estimate.model import Model
from megatron_fp8.estimate.pipeline import bubble, peak

MODEL = Model(num_layers=8, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=4)


def test_a_stage_holds_as_many_as_there_are_stages_from_it_on() -> None:
    assert [peak(MODEL, stage, 16, {0: 10})[0] for stage in range(4)] == [40, 30, 20, 10]
    assert peak(MODEL, 0, 2, {0: 10})[0] == 20, "no more than there are"


def test_interleaved_stages_hold_more() -> None:
    model = dataclasses.replace(MODEL, virtual_pipeline_model_parallel_size=2)
    # Warm-up of the first stage: 2 x 3 + 4 forwards, and one more before the first backward.
    size, flying = peak(model, 0, 16, {0: 1, 1: 1})
    assert size == sum(flying.values()) == 11
    assert peak(model, 3, 16, {0: 1, 1: 1})[0] == 5
    assert bubble(model, 16) == 3 / 32

"""What an estimate plans for each site, and microbatches in flight by hand."""

from __future__ import annotations

import dataclasses

from megatron_fp8.estimate.config_reader import read
from megatron_fp8.estimate.estimate import peak
from megatron_fp8.estimate.model import Model


def test_first_and_last_layers_stay_in_bf16() -> None:
    def in_fp8(*options: str) -> list[int | None]:
        plans = read(["--config=tiny_gpt_cpu", "--model.num_layers=4", *options]).model.plans
        layers = {f"decoder.layers.{n}.mlp.linear_fc1": n for n in range(4)}
        numbers = {**layers, "mtp.layers.0.transformer_layer.mlp.linear_fc1": None}
        return [n for name, n in numbers.items() if plans.of(name).precision == "fp8"]

    ends = ("--model.num_layers_at_start_in_bf16=0", "--model.num_layers_at_end_in_bf16=2")
    assert in_fp8() == [1, 2, None], "multi-token prediction has layers of its own"
    assert in_fp8(*ends) == [0, 1, None]
    assert in_fp8(*ends, "--model.first_last_layers_bf16=false") == [0, 1, 2, 3, None]


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

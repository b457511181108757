"""What an estimate plans for each site, before there is a model."""

from __future__ import annotations

from megatron_fp8.estimate.settings import read
from megatron_fp8.estimate.sites import Plans


def test_first_and_last_layers_stay_in_bf16() -> None:
    def in_fp8(*options: str) -> list[int | None]:
        plans = Plans(read(["--config=tiny_gpt_cpu", "--model.num_layers=4", *options]).model)
        layers = {f"decoder.layers.{n}.mlp.linear_fc1": n for n in range(4)}
        numbers = {**layers, "mtp.layers.0.transformer_layer.mlp.linear_fc1": None}
        return [n for name, n in numbers.items() if plans.of(name, n).precision == "fp8"]

    ends = ("--model.num_layers_at_start_in_bf16=0", "--model.num_layers_at_end_in_bf16=2")
    assert in_fp8() == [1, 2, None], "multi-token prediction has layers of its own"
    assert in_fp8(*ends) == [0, 1, None]
    assert in_fp8(*ends, "--model.first_last_layers_bf16=false") == [0, 1, 2, 3, None]

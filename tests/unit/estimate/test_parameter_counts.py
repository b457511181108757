"""Parameters against published totals. Shapes and names are held against real models in tests/functional."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_fp8.estimate.config_reader import read
from megatron_fp8.estimate.parameter_counts import chunk_parameters, totals

# Total; of a token; of multi-token prediction. DeepSeek-V3's published total has its experts' biases too.
PUBLISHED = {
    "llama3_8b": (8_030_261_248, 8_030_261_248, 0),
    "llama3_70b": (70_553_706_496, 70_553_706_496, 0),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704, 0),
    "deepseek_v3": (671_026_419_200 - 58 * 256, 37_552_282_624, 11_610_067_968),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    found = totals(read([f"--config=examples/configs/{name}.yaml"]).model)
    assert (found.total, found.active, found.prediction) == PUBLISHED[name]


def test_totals_do_not_depend_on_the_layout() -> None:
    model = read(["--config=examples/configs/tiny_gelu_cpu.yaml"]).model
    once = totals(model).total
    for tp, pp in ((1, 1), (4, 1), (2, 2), (1, 4)):
        cut = dataclasses.replace(model, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        assert totals(cut).total == once


def test_of_experts_a_token_uses_as_many_as_it_is_sent_to() -> None:
    options = [
        "--config=examples/configs/tiny_gpt_cpu.yaml",
        "--model.num_moe_experts=8",
        "--model.moe_router_topk=2",
    ]
    found = totals(read(options).model)
    experts = 4 * 8 * 3 * 256 * 768  # layers, experts, gate and up and down
    assert found.total - found.active == experts * 6 // 8


def test_what_a_second_stage_copies_counts_once() -> None:
    """The last stage has a table of tokens of its own for multi-token prediction, which a tied output layer is given."""
    model = read(["--config=examples/configs/tiny_gelu_cpu.yaml", "--model.mtp_num_layers=1"]).model
    once = totals(model)
    cut = dataclasses.replace(model, pipeline_model_parallel_size=2)
    assert totals(cut) == once and once.prediction > 0
    copies = [p.name for chunk in cut.chunks() for p in chunk_parameters(cut, chunk) if p.copy]
    assert copies == ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]

"""What moe_fp8_dispatch cannot be had with: one line that names value, rule and remedy, before anything is built."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from megatron_fp8.mcore.config.transformer_config import TransformerConfig
from megatron_fp8.recipe import Float8BlockScaling, Float8CurrentScaling

MOE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_moe_experts": 4,
    "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall",
    "fp8": "e4m3",
    "fp8_format": "blockwise",
    "moe_fp8_dispatch": True,
    "bf16": True,
    "params_dtype": torch.bfloat16,
}


def only_input(role: str) -> Any:
    return None if role == "grad_output" else Float8BlockScaling()


def by_tensor(role: str) -> Any:
    return Float8CurrentScaling() if role == "grad_output" else Float8BlockScaling()


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"fp8_format": "tensorwise"},
        ["fp8_recipe='tensorwise'", "one scale per tensor", "'blockwise', 'mxfp8'"],
    ),
    ({"fp8_format": "delayed"}, ["fp8_recipe='delayed'", "one scale per tensor", "'rowwise'"]),
    (
        {"fp8_format": "custom", "fp8_quantizer_factory": f"{__name__}.only_input"},
        ["leaves grad_output in high precision", "Quantize it"],
    ),
    (
        {"fp8_format": "custom", "fp8_quantizer_factory": f"{__name__}.by_tensor"},
        ["fp8_recipe='custom'", "one scale per tensor"],
    ),
    (
        {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True},
        ["moe_token_dispatcher_type='flex'", "DeepEP", "'alltoall' or 'allgather'"],
    ),
    ({"fp8_wgrad": False}, ["fp8_wgrad=False", "Set fp8_wgrad=True"]),
    (
        {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 256},
        ["moe_shared_expert_overlap=True", "Set moe_shared_expert_overlap=False"],
    ),
    (
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1},
        ["moe_apply_probs_on_input=True", "not multiplied"],
    ),
    ({"add_bias_linear": True}, ["add_bias_linear=True", "Set add_bias_linear=False"]),
    ({"moe_fp8_dispatch": "yes"}, ["moe_fp8_dispatch='yes'"]),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_what_it_cannot_be_had_with_is_refused_in_one_line(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        TransformerConfig(**{**MOE, **fields})
    said = str(refused.value)
    assert "\n" not in said and "moe_fp8_dispatch" in said
    for word in words:
        assert word in said


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_recipes_whose_scales_travel_with_a_token_are_taken(recipe: str) -> None:
    config = TransformerConfig(**{**MOE, "fp8_format": recipe})
    assert config.moe_fp8_dispatch
    config.freeze()
    with pytest.raises(ValueError, match="moe_fp8_dispatch=False comes after the model was built"):
        config.moe_fp8_dispatch = False


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fp8": None, "fp8_format": None}, "moe_fp8_dispatch=True has no effect because fp8 is None"),
        ({"num_moe_experts": None}, "moe_fp8_dispatch=True has no effect without num_moe_experts"),
    ],
)
def test_where_it_does_nothing_that_is_said(fields: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        TransformerConfig(**{**MOE, **fields})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        TransformerConfig(**{**MOE, **fields, "moe_fp8_dispatch": False})
    assert not any("moe_fp8_dispatch" in str(warning.message) for warning in heard)

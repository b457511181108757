"""What moe_fp8_dispatch, or Transformer Engine's layers, exclude: one line that names value, rule and remedy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from megatron_fp8.mcore.config.transformer_config import TransformerConfig
from megatron_fp8.recipe import Float8BlockScaling, Float8CurrentScaling

MOE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_moe_experts": 4, "add_bias_linear": False,
    "moe_token_dispatcher_type": "alltoall", "fp8": "e4m3", "fp8_format": "blockwise", "moe_fp8_dispatch": True,
    "bf16": True, "params_dtype": torch.bfloat16,
}  # fmt: skip
TE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "bf16": True, "fp8": "hybrid",
    "fp8_format": "tensorwise", "fp8_backend": "transformer_engine",
}  # fmt: skip


def only_input(role: str) -> Any:
    return None if role == "grad_output" else Float8BlockScaling()


def by_tensor(role: str) -> Any:
    return Float8CurrentScaling() if role == "grad_output" else Float8BlockScaling()


CUSTOM = {"fp8_format": "custom"}
WITH_DISPATCH: list[tuple[dict[str, Any], list[str]]] = [
    ({"fp8_format": "delayed"}, ["fp8_recipe='delayed'", "one scale per tensor", "'rowwise'"]),
    ({**CUSTOM, "fp8_quantizer_factory": f"{__name__}.only_input"}, ["leaves grad_output in high", "Quantize it"]),
    ({**CUSTOM, "fp8_quantizer_factory": f"{__name__}.by_tensor"}, ["fp8_recipe='custom'", "one scale per tensor"]),
    ({"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}, ["='flex'", "DeepEP", "'alltoall' or 'allg"]),
    ({"fp8_wgrad": False}, ["fp8_wgrad=False", "Set fp8_wgrad=True"]),
    ({"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 256}, ["Set moe_shared_expert_overlap"]),
    ({"moe_apply_probs_on_input": True, "moe_router_topk": 1}, ["moe_apply_probs_on_input=True", "not multiplied"]),
    ({"add_bias_linear": True}, ["add_bias_linear=True", "Set add_bias_linear=False"]),
]  # fmt: skip

WITH_TE: list[tuple[dict[str, Any], str]] = [
    ({"fp8_wgrad": False}, "no weight gradient in BF16"),
    ({"fp8_param": True}, "FP8 weights are this package's own"),
    ({"fp8_output_layer": True}, "the output projection is none of its layers"),
    ({"fp8_high_precision_warmup": 0.1}, "phases in BF16"),
    ({"num_moe_experts": 4}, "shares amaxes between ranks that hold different experts"),
    ({"fp8_overrides": {"*.linear_fc1": "mxfp8"}}, "one recipe for all layers"),
    ({"fp8_format": "rowwise"}, "no rowwise recipe"),
    ({"fp8_format": "delayed", "fp8_interval": 2}, "every iteration, not every 2"),
]


@pytest.mark.parametrize(("fields", "words"), WITH_DISPATCH)
def test_what_dispatch_excludes(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        TransformerConfig(**{**MOE, **fields})
    said = str(refused.value)
    assert "\n" not in said and "moe_fp8_dispatch" in said
    for word in words:
        assert word in said


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_recipes_whose_scales_travel_with_a_token_are_taken(recipe: str) -> None:
    config = TransformerConfig(**{**MOE, "fp8_format": recipe})
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
def test_where_dispatch_does_nothing_that_is_said(fields: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        TransformerConfig(**{**MOE, **fields})
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        TransformerConfig(**{**MOE, **fields, "moe_fp8_dispatch": False})
    assert not any("moe_fp8_dispatch" in str(warning.message) for warning in heard)


@pytest.mark.parametrize(("fields", "says"), WITH_TE)
def test_settings_that_te_would_drop_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match="fp8_backend='transformer_engine'") as caught:
        TransformerConfig(**{**TE, **fields})
    assert says in str(caught.value) and "fp8_backend='native'" in str(caught.value)


def test_settings_that_te_honours_are_accepted() -> None:
    TransformerConfig(
        **TE, fp8_overrides={"*.linear_fc1": "bf16"}, fp8_pow2_scales=True, fp8_amax_epsilon=1e-6,
        first_last_layers_bf16=True, num_layers_at_end_in_bf16=0,
    )  # fmt: skip

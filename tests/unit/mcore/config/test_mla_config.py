"""MLATransformerConfig: Megatron-Core's defaults, this package's FP8 fields, and what is refused in one line."""

import dataclasses

import pytest
from megatron.core.transformer import transformer_config as megatron_config

from megatron_fp8.mcore.config.transformer_config import MLATransformerConfig, TransformerConfig

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
FP8 = {"fp8": "hybrid", "fp8_format": "mxfp8"}


def test_its_defaults_are_megatrons():
    ours, theirs = MLATransformerConfig(**SIZES), megatron_config.MLATransformerConfig(**SIZES)
    for field in dataclasses.fields(megatron_config.MLATransformerConfig):
        if field.name != "fp8_recipe" and not callable(getattr(theirs, field.name)):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert isinstance(ours, TransformerConfig) and isinstance(ours, megatron_config.MLATransformerConfig)


def test_fp8_format_and_replace():
    config = MLATransformerConfig(**SIZES, **FP8, q_lora_rank=None)
    assert config.fp8_recipe == "mxfp8" and config.q_lora_rank is None
    assert dataclasses.replace(config, v_head_dim=32).fp8_format == "mxfp8"


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be a whole number"),
        ({"rope_type": "yearn"}, "Did you mean 'yarn'"),
        ({"qk_pos_emb_head_dim": 15}, "turn pairs of channels"),
        ({"tensor_model_parallel_size": 2, "q_lora_rank": 31}, "an equal part of the down projection's rows"),
        ({"tensor_model_parallel_size": 2, "kv_lora_rank": 31}, "which are kv_lora_rank"),
        ({"num_query_groups": 2}, "leave num_query_groups out"),
        ({"rotary_base": 1}, "rotary_base=1 must be a finite number above 1"),
        (
            {"rope_type": "rope", "rotary_percent": 0.01},
            "rotary_percent=0.01, qk_pos_emb_head_dim=64: rotary",
        ),
        ({"beta_slow": 33}, "beta_slow=33, beta_fast=32: frequencies"),
    ],
)
def test_what_cannot_be_is_one_line_before_a_model_is_built(fields, said):
    with pytest.raises(ValueError) as error:
        MLATransformerConfig(**SIZES, **FP8, **fields)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_config_without_the_sizes_is_refused_by_name():
    with pytest.raises(ValueError, match=r"megatron_fp8\.MLATransformerConfig"):
        TransformerConfig(**SIZES, **FP8, multi_latent_attention=True)

"""MLATransformerConfig: Megatron-Core's defaults, this package's FP8 fields, and what is refused in one line."""

import dataclasses
import itertools
import types
import warnings

import pytest
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_find_correction_range
from megatron.core.transformer import transformer_config as megatron_config

from megatron_fp8.mcore.config.mla_config import MLATransformerConfig
from megatron_fp8.mcore.config.mla_field_rules import stretched_from_and_to
from megatron_fp8.mcore.config.transformer_config import TransformerConfig

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
        ({"v_head_dim": 1.5}, "v_head_dim=1.5 must be a whole number"),
        ({"rope_type": "yearn"}, "Did you mean 'yarn'"),
        ({"qk_pos_emb_head_dim": 15}, "turn pairs of channels"),
        ({"tensor_model_parallel_size": 2, "q_lora_rank": 31}, "an equal part of the down projection's rows"),
        ({"tensor_model_parallel_size": 2, "kv_lora_rank": 31}, "which are kv_lora_rank"),
        ({"num_query_groups": 2}, "leave num_query_groups out"),
        ({"cache_mla_latents": True}, "generation.Decoder keeps"),
        ({"rotary_interleaved": True}, "not neighbours"),
        ({"rotary_base": 1}, "rotary_base=1 must be a finite number above 1"),
        (
            {"rope_type": "rope", "rotary_percent": 0.01},
            "rope_type='rope', rotary_percent=0.01, qk_pos_emb_head_dim=64: rotary",
        ),
        (
            {"rope_type": "rope", "qk_pos_emb_head_dim": 6, "rotary_percent": 0.5},
            "must be even and at least 2",
        ),
        (
            {"rotary_scaling_factor": 1e-30},
            "rotary_scaling_factor=1e-30 must be a finite number of at least 1",
        ),
        ({"mscale": 1e30}, "mscale=1e+30 must be a finite number of at least 0 and at most 100"),
        ({"mscale_all_dim": 1e30}, "mscale_all_dim=1e+30 must be a finite number"),
        ({"beta_slow": 33}, "beta_slow=33, beta_fast=32: frequencies"),
        ({"rotary_base": 2.0}, "would lie on one side of YaRN's ramp"),
        ({"original_max_position_embeddings": 2}, "would lie on one side of YaRN's ramp"),
        ({"beta_fast": float("nan")}, "beta_fast=nan must be"),
    ],
)
def test_what_cannot_be_is_one_line_before_a_model_is_built(fields, said):
    with pytest.raises(ValueError) as error:
        MLATransformerConfig(**SIZES, **FP8, **fields)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_config_without_the_sizes_is_refused_by_name():
    with pytest.raises(ValueError, match=r"megatron_fp8\.MLATransformerConfig"):
        TransformerConfig(**SIZES, **FP8, multi_latent_attention=True)


def test_the_ramp_is_where_megatron_has_it():
    """Also where it falls, which is refused."""
    falling = 0
    for base, context, channels, fast in itertools.product(
        (2.0, 1e4, 1e6), (2, 64, 4096, 2**24), (2, 16, 64), (1, 32)
    ):
        settings = types.SimpleNamespace(
            rotary_base=base, original_max_position_embeddings=context, qk_pos_emb_head_dim=channels,
            beta_fast=fast, beta_slow=1,
        )  # fmt: skip
        found = stretched_from_and_to(settings)
        assert found == _yarn_find_correction_range(fast, 1, channels, base, context), settings
        falling += found[0] > found[1]
    assert falling


def said(**fields):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MLATransformerConfig(**SIZES, **FP8, **fields)
    return [str(w.message) for w in caught if "no effect" in str(w.message)]


def test_what_has_no_effect_is_said():
    assert said() == []
    assert said(rope_type="rope", mscale=0.5) == ["mscale=0.5 has no effect without rope_type='yarn'"]
    assert said(rotary_percent=0.5) == ["rotary_percent=0.5 has no effect without rope_type='rope'"]
    assert said(rope_type="rope", rotary_percent=0.5) == []


def test_the_softmax_scale_has_its_stretch_whatever_turns_the_heads():
    """Megatron-Core's MultiLatentAttention.__init__ asks for no rope_type there."""
    assert said(rope_type="rope", mscale_all_dim=1.0, rotary_scaling_factor=8.0) == []
    assert said(rope_type="rope", rotary_scaling_factor=8.0) == [
        "rotary_scaling_factor=8.0 has no effect without rope_type='yarn' or mscale_all_dim"
    ]


@pytest.mark.parametrize(
    "name, value", [("kv_channels", 17), ("softmax_scale", 0.5), ("add_qkv_bias", True), ("no_rope_freq", 2)]
)
def test_what_is_dense_attentions_is_said_to_have_no_effect(name, value):
    assert said(**{name: value}) == [f"{name}={value!r} has no effect with multi_latent_attention"]


def test_a_copy_is_said_nothing_of():
    """Megatron-Core fills kv_channels in, which a copy is given."""
    config = MLATransformerConfig(**SIZES, **FP8)
    assert (
        said(**{name: getattr(config, name) for name in ("kv_channels", "num_query_groups", "softmax_scale")})
        == []
    )

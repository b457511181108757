"""config.json <-> model section: what maps, both ways, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_fp8.huggingface.architectures import ARCHITECTURES, entries, gemms, never_fp8
from megatron_fp8.huggingface.checkpoint_reader import Source
from megatron_fp8.huggingface.config import exported_architecture, heads_of, hf_config, model_section
from megatron_fp8.huggingface.exporter import describe
from tests.support.hf_small import CONFIG

LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_a_llama_becomes_a_section_and_comes_back():
    section = model_section(CONFIG)
    assert section["num_layers"] == 2 and section["num_query_groups"] == 1 and section["kv_channels"] == 128
    assert (section["vocab_size"], section["padded_vocab_size"]) == (200, 256)
    assert (section["normalization"], section["activation_func"], section["gated_linear_unit"]) == (
        "RMSNorm",
        "silu",
        True,
    )
    assert section["add_bias_linear"] is False and section["hidden_dropout"] == 0.0
    back = hf_config(section, 200, 64)
    assert {name: back[name] for name in CONFIG if name != "torch_dtype"} == {
        name: value for name, value in CONFIG.items() if name != "torch_dtype"
    }


def test_a_mistral_is_a_llama_by_another_name():
    mistral = {
        **CONFIG,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    }
    section = model_section(mistral)
    assert section == model_section(CONFIG)
    assert hf_config(section, 200, 64)["model_type"] == "llama"
    again = hf_config(section, 200, 64, "MistralForCausalLM")
    assert again["model_type"] == "mistral" and again["sliding_window"] is None  # left out, it would be 4096
    assert model_section(again) == section
    assert hf_config(section, 200, 64, "Qwen2ForCausalLM")["model_type"] == "llama"  # which has biases


def test_how_a_directory_was_quantized_is_not_taken_over(tmp_path):
    announced = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    given = {**CONFIG, "quantization_config": announced, "compression_config": announced, "extra": 1}
    (tmp_path / "config.json").write_text(json.dumps(given))
    source = Source(tmp_path, model_section(CONFIG), {}, None, None, [])
    written = describe(source, tmp_path, None, None)
    assert written["extra"] == 1 and not written.keys() & {"quantization_config", "compression_config"}


def test_the_section_is_a_run_config_that_megatron_core_takes():
    from megatron_fp8.train.config.model_section import padded_vocab_size, transformer_config
    from megatron_fp8.train.config.run_config import ModelSection

    made = ModelSection(**model_section({**CONFIG, "rope_scaling": LLAMA3, "vocab_size": 1100}))
    config = transformer_config(made)
    assert (config.num_query_groups, config.layernorm_epsilon, config.kv_channels) == (1, 1e-5, 128)
    for ranks in (1, 2, 4, 8):  # whatever Megatron-Core's rule would make of it
        made.tensor_model_parallel_size = ranks
        assert padded_vocab_size(made, 1000) == 1152
    made.tensor_model_parallel_size = 5
    with pytest.raises(ValueError, match=r"padded_vocab_size=1152 must be .* a multiple of .*=5"):
        padded_vocab_size(made, 1000)


@pytest.mark.parametrize(
    ("fields", "section"),
    [
        ({"num_key_value_heads": None, "head_dim": None}, {"num_query_groups": 2, "kv_channels": 64}),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"rotary_base": 500000}),
        ({"rope_scaling": {**LLAMA3}}, {"rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 10000}),
        ({"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
         {"rope_scaling": True, "rotary_base": 500000}),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "type": "llama3", "rope_theta": 1e4}},
         {"rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 10000}),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 4096,
          "use_sliding_window": False},
         {"add_qkv_bias": True, "qk_layernorm": False}),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": None},
         {"qk_layernorm": True, "kv_channels": 128}),
        ({"tie_word_embeddings": True}, {"share_embeddings_and_output_weights": True}),
    ],
)  # fmt: skip
def test_other_forms(fields, section):
    made = model_section({**CONFIG, **fields})
    assert {name: made[name] for name in section} == section


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures=\['GPT2LMHeadModel'\].*Qwen3MoeForCausalLM"),
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*cannot be imported: it multiplies embeddings"),
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM.*side by side"),
        ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": 2047}, "sliding_window=2047"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}, "sliding_window=64"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "no sliding_window, .*MistralFor.* 4096"),
        ({"architectures": None}, "architectures=.*LlamaForCausalLM, MistralForCausalLM, Phi3ForCausalLM"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads do not divide among 2"),
        ({"rope_theta": 10000.5}, "rope_theta=10000.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "type 'yarn'.*'llama3'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, "'full_attention'"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e4}},
         "rope_type='llama3' in its rope_scaling and 'default' in its rope_parameters"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 8.0}},
         "factor=32.0 in its rope_scaling and 8.0 in its rope_parameters"),
        ({"rope_theta": None, "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
         "rope_theta=None in its rope_scaling and 500000.0 in its rope_parameters"),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, r"rope_theta=10000.0, and rope_theta=500000.0 in its"),
        ({"model_type": "qwen3"}, "model_type='qwen3'.*'llama'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}}, "high_freq_factor=8.0.*fixed at 4.0"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "has no factor in its rope scaling: a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "has no low_freq_factor in its rope scaling"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 4096}}, "=4096.*fixed at 8192"),
    ],
)  # fmt: skip
def test_what_megatron_core_cannot_compute_is_refused_by_name(fields, words):
    with pytest.raises(ValueError, match=words):
        model_section({**CONFIG, **fields})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"), ("gated_linear_unit", False), ("activation_func", "gelu"),
        ("add_bias_linear", True), ("position_embedding_type", "learned_absolute"), ("rotary_percent", 0.5),
        ("rotary_interleaved", True), ("layernorm_zero_centered_gamma", True),
        ("window_size", (128, 0)), ("mtp_num_layers", 1),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_not_exported(name, value):
    section = model_section(CONFIG)
    assert exported_architecture(section).name == "LlamaForCausalLM"
    with pytest.raises(ValueError, match=f"model.{name}="):
        exported_architecture({**section, name: value})


def test_a_plain_megatron_section_is_refused_for_its_defaults():
    """What a config file leaves out is Megatron-Core's default: a GPT with LayerNorm and biases."""
    with pytest.raises(ValueError, match=r"model\.normalization='LayerNorm'"):
        exported_architecture({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4})


def test_both_of_qwens_options_are_no_family():
    section: dict[str, Any] = model_section(CONFIG)
    kinds = {(True, False): "Qwen2ForCausalLM", (False, True): "Qwen3ForCausalLM"}
    for (bias, norm), name in kinds.items():
        assert exported_architecture({**section, "add_qkv_bias": bias, "qk_layernorm": norm}).name == name
    with pytest.raises(ValueError, match=r"add_qkv_bias=True with model\.qk_layernorm=True"):
        exported_architecture({**section, "add_qkv_bias": True, "qk_layernorm": True})


def test_sizes_left_out_of_a_section_are_megatron_cores():
    section = {
        **model_section(CONFIG),
        "num_query_groups": None,
        "kv_channels": None,
        "ffn_hidden_size": None,
    }
    config = hf_config(section, 200, 64)
    assert (config["num_key_value_heads"], config["head_dim"], config["intermediate_size"]) == (2, 64, 512)
    assert heads_of(section).sizes == (128, 128, 128)


SECTION = {
    "num_layers": 3, "num_moe_experts": 2, "moe_layer_freq": [0, 1, 1], "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 64, "q_lora_rank": 8, "mtp_num_layers": 1,
}  # fmt: skip


def test_every_linear_is_a_tensor_and_no_name_occurs_twice():
    for architecture in ARCHITECTURES.values():
        section = SECTION if architecture.experts else {"num_layers": 3}
        listed = list(entries(architecture, section))
        ours, theirs = [e.megatron for e in listed if not e.copy], [p for e in listed for p in e.parts]
        assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
        linears = {f"{part}.weight" for parts in gemms(listed).values() for part in parts}
        assert linears <= set(theirs)
        tied = list(entries(architecture, {**section, "share_embeddings_and_output_weights": True}))
        assert {e.megatron for e in listed} - {e.megatron for e in tied} == {"output_layer.weight"}
        routers = {f"model.layers.{number}.mlp.gate.weight" for number in (1, 2, 3)}
        if architecture.latent:  # DeepSeek's own directories have these in high precision
            assert {f"{name}.weight" for name in never_fp8(listed)} == {
                *routers,
                "model.layers.3.eh_proj.weight",
            }
        assert set(theirs) - linears >= {f"{name}.weight" for name in never_fp8(listed)}

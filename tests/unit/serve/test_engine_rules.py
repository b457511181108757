"""Which linears engines leave in high precision: dated fixtures from their sources, and the installed libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.huggingface.architectures import ARCHITECTURES, entries, gemms, never_fp8
from megatron_fp8.huggingface.formats import FORMATS, quantization_config
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.serve import engine_rules
from megatron_fp8.serve.engine_rules import (
    EngineRefusal,
    fused_names,
    input_rule,
    kv_cache_format,
    module_of,
    quantized_linears,
    router_dtype,
)
from megatron_fp8.serve.parity import format_of

FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "engine_rules.json").read_text())
LATENT = "model.layers.1.self_attn.q_a_proj"
QKV = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]


@pytest.mark.parametrize("rules", FIXTURE["left in high precision"])
@pytest.mark.parametrize("name", FIXTURE["lists"])
def test_a_rule_decides_as_the_engines_source(rules, name):
    method, engine = rules.split()
    ignored, expected = FIXTURE["lists"][name], FIXTURE["left in high precision"][rules][name]
    fused = fused_names(engine, [LATENT])
    rule = engine_rules._RULES[method, engine]
    left, refused = [], []
    for module in [*FIXTURE["modules"], module_of(engine, LATENT, fused)]:
        try:
            left += [module] if rule(module, ignored, fused) else []
        except EngineRefusal:
            refused.append(module)
    assert {"left": left, "refused": refused} == expected


NAMES = [*FIXTURE["modules"], *QKV, "lm_head", "model.layers.1.mlp.gate"]


@pytest.mark.parametrize("name", sorted(FIXTURE["lists"].keys() - {"wildcard"}))
def test_transformers_rules_are_those_that_are_installed(name):
    from compressed_tensors.utils.match import is_match
    from transformers.quantizers.quantizers_utils import should_convert_module

    ignored, linear = FIXTURE["lists"][name], torch.nn.Linear(2, 2)
    for module in NAMES:
        if not any(entry.startswith("re:") for entry in ignored):
            ours = engine_rules._RULES["fp8", "transformers"](module, ignored, {})
            assert ours != should_convert_module(module, ignored), module
        if not module.endswith(".experts"):
            ours = engine_rules._RULES["compressed-tensors", "transformers"](module, ignored, {})
            assert ours == is_match(module, linear, ignored), module


def families() -> dict[str, dict[str, Any]]:
    moe = {"num_layers": 2, "num_moe_experts": 2}
    latent = {"multi_latent_attention": True, "q_lora_rank": 8, "moe_layer_freq": [0, 1]}
    return {
        "LlamaForCausalLM": {"num_layers": 2},
        "MixtralForCausalLM": moe,
        "Qwen3MoeForCausalLM": {**moe, "moe_layer_freq": [0, 1]},
        "DeepseekV3ForCausalLM": {**moe, **latent, "moe_shared_expert_intermediate_size": 8},
    }


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", families())
def test_an_exports_list_means_the_same_to_vllm(family, form):
    """Nothing of the layers is left out, whatever routers' names are; and one layer's attention, if it is ignored."""
    listed = list(entries(ARCHITECTURES[family], families()[family]))
    linears = [part for parts in gemms(listed).values() for part in parts]
    attention = [name for name in linears if name.startswith("model.layers.1.self_attn.")]
    for ignored in ([], attention):
        config = quantization_config(FORMATS[form], ["lm_head", *never_fp8(listed), *ignored], False)
        found = quantized_linears("vllm", config, linears)
        assert {name for name, is_quantized in found.items() if not is_quantized} == set(ignored)
    assert format_of(config) == FORMATS[form]


@pytest.mark.parametrize("form", ["fp8-block", "fp8-channel", "mxfp8"])
def test_vllm_sees_that_mixtrals_experts_are_ignored(form):
    """In compressed-tensors it asks for experts.0.gate_proj, and they are w1."""
    listed = list(entries(ARCHITECTURES["MixtralForCausalLM"], families()["MixtralForCausalLM"]))
    experts = [part for parts in gemms(listed).values() for part in parts if ".experts." in part]
    config = quantization_config(FORMATS[form], ["lm_head", *experts], False)
    assert set(quantized_linears("vllm", config, experts).values()) == {False}


def test_an_engine_refuses_a_fused_linear_in_two_precisions():
    config = quantization_config(FORMATS["fp8-channel"], QKV[:1], False)
    with pytest.raises(
        EngineRefusal, match=r"qkv_proj: some of q_proj, k_proj, v_proj are in high precision"
    ):
        quantized_linears("vllm", config, QKV)
    assert quantized_linears("transformers", config, QKV) == dict(zip(QKV, (False, True, True), strict=True))
    with pytest.raises(ValueError, match=r"no rules for quant_method='awq' in vllm"):
        quantized_linears("vllm", {"quant_method": "awq"}, QKV)
    assert set(quantized_linears("vllm", {}, QKV).values()) == {False}


@pytest.mark.parametrize(
    ("form", "static", "engine", "words"),
    [
        ("fp8-block", False, "vllm", "e4m3 1x128 fp32"),
        ("fp8-channel", False, "vllm", "e4m3 row fp32"),
        ("fp8-tensor", False, "vllm", "e4m3 row fp32"),
        ("fp8-tensor", False, "transformers", "e4m3 tensor bf16"),
        ("fp8-channel", False, "transformers", "e4m3 row bf16"),
        ("fp8-tensor", True, "vllm", "e4m3 tensor static"),
        ("mxfp8", False, "vllm", "e4m3 1x32 e8m0"),
        ("mxfp8-modelopt", False, "vllm", "e4m3 1x32 e8m0"),
        ("nvfp4", False, "vllm", None),
        ("nvfp4", True, "vllm", "e2m1 1x16 e4m3"),
        ("nvfp4-modelopt", False, "vllm", None),
        ("nvfp4-modelopt", True, "vllm", "e2m1 1x16 e4m3"),
    ],
)
def test_how_inputs_are_quantized(form, static, engine, words):
    assert input_rule(engine, quantization_config(FORMATS[form], [], static)) == words


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        ({}, "auto", None),
        ({"kv_cache_scheme": None}, "auto", None),
        ({"kv_cache_scheme": SCHEME}, "auto", E4M3),
        ({"kv_cache_quant_algo": "FP8"}, "auto", E4M3),
        ({"kv_cache_scheme": SCHEME}, "bfloat16", None),
        ({}, "fp8", E4M3),
        ({}, "fp8_e5m2", E5M2),
    ],
)
def test_the_format_of_the_kv_cache(config, dtype, expected):
    assert kv_cache_format(config, dtype) is expected


@pytest.mark.parametrize(
    "config",
    [{"kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}, {"kv_cache_quant_algo": "NVFP4"}],
)
def test_other_caches_have_no_rules(config):
    with pytest.raises(ValueError, match="there are rules for FP8 with one scale for keys"):
        kv_cache_format(config, "auto")


def test_transformers_routers_of_deepseek_are_in_float32():
    assert router_dtype("transformers", "DeepseekV3ForCausalLM") == "fp32"
    assert (
        router_dtype("transformers", "MixtralForCausalLM")
        is router_dtype("vllm", "DeepseekV3ForCausalLM")
        is None
    )

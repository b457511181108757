"""Which linears an export leaves in high precision, and which only together."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_fp8.huggingface.architectures import ARCHITECTURES, entries, gemms
from megatron_fp8.huggingface.exporter import _reader_notes
from megatron_fp8.huggingface.formats import FORMATS
from megatron_fp8.huggingface.weight_plan import ExportOptions, _high_precision_linears

SECTION: dict[str, Any] = {
    "num_layers": 1, "num_moe_experts": 1, "multi_latent_attention": True, "q_lora_rank": 8, "fp8": "e4m3",
}  # fmt: skip
SITES = gemms(list(entries(ARCHITECTURES["DeepseekV3ForCausalLM"], SECTION)))
QUERY, KEY = (f"model.layers.0.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa"))


def kept(section: dict[str, Any], *ignore: str) -> set[str]:
    return _high_precision_linears(
        {**SECTION, **section}, SITES, ExportOptions(FORMATS["fp8-channel"], ignore)
    )


@pytest.mark.parametrize("one", ["*.q_a_proj", "*.kv_a_proj_with_mqa"])
def test_one_projection_to_latents_is_not_ignored_alone(one):
    with pytest.raises(ValueError, match=r"as one GEMM, and they must be ignored together\.$"):
        kept({}, one)
    assert kept({}, "*.q_a_proj", "*.kv_a_proj*") == {QUERY, KEY}


@pytest.mark.parametrize("site", ["linear_q_down_proj", "linear_kv_down_proj"])
def test_both_stay_where_training_kept_one(site):
    assert kept({"fp8_overrides": {f"*.{site}": "bf16"}}) == {QUERY, KEY}
    assert kept({}) == set()


def test_queries_without_a_latent_have_no_partner():
    sites = gemms(list(entries(ARCHITECTURES["DeepseekV3ForCausalLM"], {**SECTION, "q_lora_rank": None})))
    assert _high_precision_linears(
        SECTION, sites, ExportOptions(FORMATS["fp8-channel"], ("*.kv_a_proj*",))
    ) == {KEY}


@pytest.mark.parametrize(
    "said, expected",
    [({}, {0, 3}), ({"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2}, {2, 3})],
    ids=["nothing", "both ends"],
)
def test_the_ends_that_training_kept_are_the_decoders(said, expected):
    """Megatron-Core's one layer at each end, where a config does not say; multi-token prediction has none."""
    sites = {f"decoder.layers.{n}.mlp.linear_fc2": (f"layer {n}",) for n in range(4)}
    sites["mtp.layers.0.transformer_layer.mlp.linear_fc2"] = ("prediction",)
    section = {"num_layers": 4, "fp8": "e4m3", "first_last_layers_bf16": True, **said}
    wanted = ExportOptions(FORMATS["fp8-channel"])
    assert _high_precision_linears(section, sites, wanted) == {f"layer {n}" for n in expected}
    assert _high_precision_linears({**section, "fp8": None, "fp4": "e2m1"}, sites, wanted) == {
        f"layer {n}" for n in expected
    }
    assert _high_precision_linears({**section, "first_last_layers_bf16": None}, sites, wanted) == set()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "nvfp4",
            ["q_a_proj and kv_a_proj_with_mqa as one matrix", "without their tensor scales, 10,000 times"],
        ),
        ("nvfp4-modelopt", ["q_a_proj and kv_a_proj_with_mqa as one matrix"]),
        ("mxfp8", ["cannot load experts in mxfp8"]),
        ("fp8-tensor", []),
    ],
)
def test_linears_that_engines_misread_are_noted(name, words):
    """vLLM takes one tensor scale in deepseek_v2.py's fused_qkv_a_proj; transformers drops those of experts."""
    notes = _reader_notes(FORMATS[name], SITES, set())
    assert len(notes) == len(words) and all(map(str.__contains__, notes, words)), notes
    experts = {part for parts in SITES.values() for part in parts if ".experts." in part}
    assert _reader_notes(FORMATS[name], SITES, {QUERY, KEY, *experts}) == []

"""Fused matrices and FP8 forms, against rules written out on their own."""

import pytest
import torch

from megatron_fp8 import quantize
from megatron_fp8.huggingface.formats import (
    FORMATS,
    encode,
    quantization_config,
    weight_recipe,
    with_source_settings,
)
from megatron_fp8.huggingface.qkv_layout import Heads, join_qkv, pad_rows, split_qkv
from megatron_fp8.huggingface.weight_decoder import check_readable, decode
from megatron_fp8.recipe import Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling
from tests.support.hf_small import gemm_parts


@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 2, 3), (6, 6, 2), (8, 1, 5), (1, 1, 1)])
def test_rows_lie_group_by_group(heads, groups, dim):
    """Row r of the fused matrix: its group, then the group's query heads, its key, its value."""
    sizes, per_group = Heads(heads, groups, dim), heads // groups
    query = torch.arange(heads * dim) * 10
    key, value = (torch.arange(groups * dim) * 10 + part for part in (1, 2))
    expected = []
    for group in range(groups):
        expected += query[group * per_group * dim : (group + 1) * per_group * dim].tolist()
        expected += key[group * dim : (group + 1) * dim].tolist()
        expected += value[group * dim : (group + 1) * dim].tolist()
    fused = join_qkv(query, key, value, sizes)
    assert fused.tolist() == expected
    for part, back in zip((query, key, value), split_qkv(fused, sizes), strict=True):
        assert torch.equal(part, back)
    matrix = torch.randn(sum(sizes.sizes), 7)
    assert torch.equal(join_qkv(*split_qkv(matrix, sizes), sizes), matrix)


def test_heads_must_divide():
    with pytest.raises(ValueError, match="5 attention heads do not divide among 2 groups"):
        Heads(5, 2, 64)
    with pytest.raises(ValueError, match="among 0 groups"):
        Heads(4, 0, 64)


def test_padding_is_zeros_at_the_end():
    matrix = torch.ones(3, 2, dtype=torch.bfloat16)
    assert pad_rows(matrix, 5).tolist() == [[1, 1]] * 3 + [[0, 0]] * 2 and pad_rows(matrix, 3).shape == (3, 2)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block"])
def test_codes_times_scales_are_the_dequantized_weight(name):
    weights, form = gemm_parts(256, 128, 128), FORMATS[name]
    written = encode(weights, form, form.recipe)
    assert len(written) == 6
    whole = quantize(torch.cat(list(weights.values())), form.recipe, "weight").dequantize(torch.float32)
    for (key, weight), expected in zip(weights.items(), whole.split([256, 128, 128]), strict=True):
        codes, scale = written[key], written[key.replace("weight", form.scale)]
        assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape and scale.is_contiguous()
        spread = scale if name != "fp8-block" else scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(codes.float() * spread, expected)
        assert torch.equal(decode(key, codes, scale), expected)
        assert torch.equal(decode(key, codes, scale.bfloat16()), codes.float() * spread.bfloat16().float())


def test_per_tensor_the_parts_of_a_gemm_share_the_fused_scale():
    weights, form = gemm_parts(4, 8), FORMATS["fp8-tensor"]
    written = encode(weights, form, form.recipe)
    amax = max(float(weight.float().abs().max()) for weight in weights.values())
    expected = 1 / (torch.tensor(448.0) / torch.tensor(amax))
    for key in weights:
        assert written[key.replace("weight", "weight_scale")].tolist() == [float(expected)]


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_what_is_not_finite(name):
    form = FORMATS[name]
    zero = encode({"z.weight": torch.zeros(128, 128)}, form, form.recipe)
    assert not zero[f"z.{form.codes}"].view(torch.uint8).any()
    assert (zero[f"z.{form.scale}"].float() == (1 if name.startswith("fp8") else 0)).all()
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(128, 128)
        weight[3, 5] = bad
        with pytest.raises(ValueError, match=r"z\.weight holds NaN or Inf"):
            encode({"z.weight": weight}, form, form.recipe)


@pytest.mark.parametrize("shape", [(64, 128), (128, 64), (129, 128)])
def test_partial_blocks_are_refused(shape):
    form = FORMATS["fp8-block"]
    with pytest.raises(ValueError, match=r"k.weight is \[\d+, \d+\].*fp8-channel, or leave the layer out"):
        encode({"k.weight": torch.ones(shape)}, form, form.recipe)


def test_the_runs_own_recipe_is_taken_where_it_is_of_the_kind():
    section = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_margin": 2, "fp8_pow2_scales": True}
    taken = weight_recipe(FORMATS["fp8-tensor"], section)
    assert isinstance(taken, Float8CurrentScaling) and taken.margin == 2 and taken.use_power_2_scales
    assert weight_recipe(FORMATS["fp8-channel"], section) == FORMATS["fp8-channel"].recipe
    section = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_pow2_scales": False}
    assert weight_recipe(FORMATS["fp8-block"], section) == Float8BlockScaling(use_f32_scales=True)
    for recipe in ("delayed", None):
        assert (
            weight_recipe(FORMATS["fp8-tensor"], {"fp8": "hybrid", "fp8_recipe": recipe})
            == Float8CurrentScaling()
        )
    assert weight_recipe(FORMATS["fp8-tensor"], {"fp8": None}) == Float8CurrentScaling()
    section = {"fp8": None, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_disable_2d_quantization": True}
    assert weight_recipe(FORMATS["nvfp4"], section) == NVFP4BlockScaling(disable_2d_quantization=True)
    assert weight_recipe(FORMATS["fp8-tensor"], section) == Float8CurrentScaling()


def test_scales_of_no_form_are_refused():
    codes = torch.ones(256, 256).to(torch.float8_e4m3fn)
    for shape in ([2], [256, 2], [1, 256], [2, 3]):
        with pytest.raises(ValueError, match=r"w is \[256, 256\] with scales"):
            decode("w", codes, torch.ones(shape))


def test_partial_blocks_can_be_read():
    """Others write them: the last block is what is left."""
    codes = torch.ones(130, 200).to(torch.float8_e4m3fn)
    back = decode("w", codes, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert back[127, 127] == 1 and back[127, 128] == 2 and back[128, 0] == 3 and back[129, 199] == 4


@pytest.mark.parametrize("static", [False, True])
def test_what_is_announced_can_be_read(static):
    for form in FORMATS.values():
        config = quantization_config(
            form, ["lm_head", "x"], static_inputs=static and form.input_scale is not None
        )
        check_readable({"quantization_config": config})
        assert ["lm_head", "x"] in (config.get("ignore"), config.get("modules_to_not_convert"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method='gptq'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format='pack-quantized'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int", "strategy": "tensor"}}}}, "8-bit floats"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}}}, "per channel"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ'"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "format='mxfp4-pack-quantized'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": {"weights":
          {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 64}}}}, "in groups of 16"),
        ({"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"g": {"weights":
          {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16}}}}, "in groups of 32"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": {"weights":
          {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]}}}}, r"\[128, 128\]"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
          "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),  # rotates weights
    ],
)  # fmt: skip
def test_other_quantizations_are_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        check_readable({"quantization_config": config})


def test_powers_of_two_are_announced_only_of_such_scales():
    ours, theirs = {"quant_method": "fp8"}, {"quant_method": "fp8", "scale_fmt": "ue8m0"}
    for recipe, kept in (
        (Float8BlockScaling(use_f32_scales=False), True),
        (Float8BlockScaling(use_f32_scales=True), False),
    ):
        found, notes = with_source_settings(ours, theirs, recipe.rule("weight"))
        assert ("scale_fmt" in found) == kept and bool(notes) != kept
    assert with_source_settings(ours, theirs, None)[0]["scale_fmt"] == "ue8m0"

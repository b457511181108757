"""NVFP4 and MXFP8 weights of a directory: codes times scales, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_fp8 import quantize
from megatron_fp8.backends.emulated import gemm
from megatron_fp8.huggingface.directory import Tensors
from megatron_fp8.huggingface.formats import FORMATS, encode
from megatron_fp8.huggingface.weight_decoder import (
    fp4_weights,
    fp8_side,
    read_weight,
    scale_name,
)
from megatron_fp8.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from tests.support.hf_small import gemm_parts

NVFP4 = ("nvfp4", "nvfp4-modelopt")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stored(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Tensors:
    """A directory of these tensors alone, as an import opens it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    opened = Tensors(tmp_path)
    opened.view_fp4(fp4_weights(opened))
    return opened


def by_hand(codes: torch.Tensor) -> torch.Tensor:
    """The values of bytes with two codes each, the first in the low half."""
    return E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]


def test_a_bias_has_no_scale():
    names = {"q_proj.weight", "q_proj.bias", "q_proj.weight_scale"}
    assert (
        scale_name("q_proj.weight", names) == "q_proj.weight_scale"
        and scale_name("q_proj.bias", names) is None
    )


@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_parts_hold_the_values_of_the_fused_matrix(name, tmp_path):
    weights, form = gemm_parts(64, 32, 16), FORMATS[name]
    whole = quantize(torch.cat(list(weights.values())), NVFP4BlockScaling(), "weight").dequantize(
        torch.float32
    )
    written = encode(weights, form, form.recipe)
    assert len(written) == 9
    opened = stored(tmp_path, written)
    for key, expected in zip(weights, whole.split([64, 32, 16]), strict=True):
        codes, scale, second = (
            written[key.replace("weight", last)] for last in (form.codes, form.scale, form.tensor_scale)
        )
        factor = second if name == "nvfp4-modelopt" else 1 / second
        assert torch.equal(by_hand(codes) * scale.float().repeat_interleave(16, 1) * factor, expected)
        rows = scale.view(torch.uint8).unflatten(0, (-1, 16))
        assert torch.equal(rows, rows[:, :1].expand_as(rows))  # 16x16 blocks
        assert opened.shape(key) == list(expected.shape) and torch.equal(read_weight(key, opened), expected)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block", "mxfp8"])
def test_an_engine_multiplies_stored_codes_as_training_does(name):
    """The product of a decoded side has the bytes of the product of training's own."""
    form, weight, x = FORMATS[name], torch.randn(128, 256).bfloat16(), torch.randn(5, 256).bfloat16()
    written = encode({"a.weight": weight}, form, form.recipe)
    inputs, own = quantize(x, form.recipe, "input").rowwise, quantize(weight, form.recipe, "weight").rowwise
    decoded = fp8_side("a.weight", written["a.weight"], written[f"a.{form.scale}"])
    products = [gemm(inputs, side, out_dtype=torch.bfloat16) for side in (decoded, own)]
    assert torch.equal(*products) and products[0].norm() > 100


def test_compressed_tensors_packs_the_same_bytes():
    """The library's own compressor, given the values and our scales, and its decompressor. It writes -0 as 0."""
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    form = FORMATS["nvfp4"]
    written = encode(gemm_parts(48, cols=64), form, form.recipe)
    ours = {name.rpartition(".")[2]: tensor for name, tensor in written.items()}
    expected = quantize(gemm_parts(48, cols=64)["a.0.weight"], form.recipe, "weight").dequantize(
        torch.float32
    )
    back = NVFP4PackedCompressor.decompress(ours, scheme)["weight"]
    assert torch.equal(back, expected.bfloat16())
    scale = ours["weight_scale"].float()
    packed = NVFP4PackedCompressor.compress({**ours, "weight": expected, "weight_scale": scale}, scheme)
    assert torch.equal(by_hand(packed["weight_packed"]), by_hand(ours["weight_packed"]))
    assert torch.equal(packed["weight_scale"].view(torch.uint8), ours["weight_scale"].view(torch.uint8))


def test_mxfp8_is_codes_times_powers_of_two(tmp_path):
    weights, form = gemm_parts(8, 3), FORMATS["mxfp8"]
    written = encode(weights, form, form.recipe)
    opened = stored(tmp_path, written)
    for key, weight in weights.items():
        codes, scale = written[key], written[f"{key}_scale"]
        expected = quantize(weight, MXFP8BlockScaling(), "weight").dequantize(torch.float32)
        assert (codes.dtype, scale.dtype, list(scale.shape)) == (
            torch.float8_e4m3fn,
            torch.uint8,
            [len(weight), 8],
        )
        assert torch.equal(codes.float() * 2.0 ** (scale.float() - 127).repeat_interleave(32, 1), expected)
        assert torch.equal(read_weight(key, opened), expected)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [("nvfp4", (24, 32), "16: for --format=nvfp4 it needs whole 16x16"), ("nvfp4-modelopt", (32, 24), "whole 16x16"),
     ("mxfp8", (32, 48), r"whose columns are no multiple of 32: .* whole 1x32 blocks\. .*--ignore")],
)  # fmt: skip
def test_partial_blocks_are_not_written(name, shape, words):
    with pytest.raises(ValueError, match=rf"k\.weight is .*{words}"):
        encode({"k.weight": torch.ones(shape)}, FORMATS[name], FORMATS[name].recipe)


def changed(last: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    form = FORMATS["nvfp4"]
    written = encode({"k.weight": torch.ones(16, 32)}, form, form.recipe) | {f"k.{last}": value}
    return {name: tensor for name, tensor in written.items() if tensor is not None}


def scales(value: float) -> torch.Tensor:
    return torch.full((16, 2), value).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("last", "value", "words"),
    [
        ("weight_scale", scales(float("nan")), "damaged: a block's scale is nan"),
        ("weight_scale", scales(-1), "damaged: a block's scale is -1"),
        ("weight_scale", torch.ones(16, 2), r"with scales torch.float32 \[16, 2\]"),
        ("weight_scale", torch.ones(1, 2).to(torch.float8_e4m3fn), r"with scales torch.float8_e4m3fn \[1, 2\]"),
        ("weight_global_scale", torch.zeros(1), "one finite float32 above 0 and not 0"),
        ("weight_global_scale", torch.full((1,), -1.0), "above 0 and not -1"),
        ("weight_global_scale", torch.full((1,), float("inf")), "above 0 and not inf"),
        ("weight_global_scale", torch.full((1,), float("nan")), "above 0 and not nan"),
        ("weight_global_scale", torch.ones(1, dtype=torch.bfloat16), "weight_global_scale is torch.bfloat16"),
        ("weight_global_scale", torch.ones(2), r"weight_global_scale is torch.float32 \[2\]"),
        ("weight_scale_2", torch.ones(1), "k.weight_global_scale and k.weight_scale_2"),
        ("weight", torch.ones(16, 32), "k.weight is there and k.weight_packed too"),
    ],
)  # fmt: skip
def test_damaged_nvfp4_is_refused(tmp_path, last, value, words):
    with pytest.raises(ValueError, match=words):
        read_weight("k.weight", stored(tmp_path, changed(last, value)))


def test_nvfp4_without_a_tensor_scale_is_not_taken_for_it(tmp_path):
    opened = stored(tmp_path, changed("weight_global_scale", None))
    assert opened.dtype("k.weight_packed") == torch.uint8 and "k.weight" not in opened.names()


def test_mxfp8_scales_and_second_scales_of_fp8_are_refused(tmp_path):
    codes = torch.ones(16, 32).to(torch.float8_e4m3fn)
    nan = {"k.weight": codes, "k.weight_scale": torch.full((16, 1), 255, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="a scale of it is 255, which is NaN"):
        read_weight("k.weight", stored(tmp_path, nan))
    two = {"k.weight": codes, "k.weight_scale": torch.ones(1), "k.weight_global_scale": torch.ones(1)}
    with pytest.raises(ValueError, match="NVFP4 weights alone have one"):
        read_weight("k.weight", stored(tmp_path, two))

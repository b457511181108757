"""What is printed of modules, tensors and settings is one short line, without values of tensors."""

import torch
from torch import nn

from megatron_fp8 import Fp8Config, convert_to_fp8, quantize
from megatron_fp8.recipe import Float8BlockScaling, MXFP8BlockScaling


def test_a_quantized_tensor_says_what_it_is():
    found = quantize(torch.zeros(100, 300), MXFP8BlockScaling(), "input", direction="both")
    scales = "scale_inv float8_e8m0fnu"
    rowwise = f"rowwise=QuantizedSide(e4m3 [100, 300], {scales} [100, 10] per 1x32, cpu)"
    columnwise = f"columnwise=QuantizedSide(e4m3 [300, 100], {scales} [300, 4] per 1x32, cpu)"
    assert repr(found) == f"Float8Tensor([100, 300] of torch.float32, {rowwise}, {columnwise})"


def test_what_is_at_its_default_is_left_out():
    assert repr(Fp8Config()) == "Fp8Config()"
    assert repr(Fp8Config(recipe="mxfp8", overrides={"a": "bf16"})) == (
        "Fp8Config(recipe='mxfp8', overrides={'a': 'bf16'})"
    )
    assert repr(Float8BlockScaling(use_f32_scales=True)) == "Float8BlockScaling(use_f32_scales=True)"


def test_a_converted_model_prints_a_line_a_layer(capsys):
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), "delayed")
    capsys.readouterr()
    assert repr(model[0]) == "Fp8Linear(in_features=32, out_features=32, bias=True, recipe=DelayedScaling())"
    assert repr(model.fp8_report) == "Fp8Report(1 of 1 modules run in FP8; print it for the table)"

"""An engine's casts of inputs, by hand: static and dynamic scales, NaN."""

import pytest
import torch

from megatron_fp8 import quantize
from megatron_fp8.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from megatron_fp8.serve.engine_site import input_cast

X = torch.randn(5, 256, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()


@pytest.mark.parametrize(
    ("rule", "recipe"),
    [("e4m3 1x128 pow2", Float8BlockScaling()), ("e4m3 1x32 e8m0", MXFP8BlockScaling())],
)
def test_a_rule_that_training_has_casts_as_training(rule, recipe):
    assert torch.equal(input_cast(rule, ())(X), quantize(X, recipe, "input").dequantize(torch.float32))


def test_a_scale_of_each_token_is_its_amax():
    values = input_cast("e4m3 row fp32", ())(X)
    scale = X.float().abs().amax(1, keepdim=True) / 448
    codes = (X.float() / scale).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(values.abs().amax(1), X.float().abs().amax(1))
    torch.testing.assert_close(
        values, codes * scale, rtol=2**-3, atol=0
    )  # a rounding to another code at most
    assert values.isclose(codes * scale, rtol=1e-6, atol=0).float().mean() > 0.99


def test_the_largest_static_scale_of_a_fused_linear_is_used_and_saturates():
    scales = [torch.tensor([0.001]), torch.tensor([2.0**-10])]
    values = input_cast("e4m3 tensor static", scales)(X)
    assert float(values.abs().max()) == pytest.approx(0.448)
    small = X.float().abs() < 0.4
    torch.testing.assert_close(values[small], X.float()[small], rtol=2**-4, atol=0.001 * 2**-9)


def test_nvfp4_has_the_static_second_scale_and_hides_no_nan():
    own = X.float().abs().max() / 2688
    cast = input_cast("e2m1 1x16 e4m3", [own, own / 2])
    assert torch.equal(cast(X), quantize(X, NVFP4BlockScaling(), "input").dequantize(torch.float32))
    assert not torch.equal(input_cast("e2m1 1x16 e4m3", [own * 3])(X), cast(X))
    broken = X.clone()
    broken[2, 3] = torch.nan
    assert cast(broken).isnan().nonzero().tolist() == [[2, 3]]


def test_transformers_rounds_scales_and_values_to_the_models_dtype():
    values = input_cast("e4m3 row bf16", (), in_bf16=True)(X)
    assert torch.equal(values, values.bfloat16().float())
    scale = (X.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (X / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(values, (codes.bfloat16() * scale).float())
    assert not input_cast("e4m3 tensor bf16", (), in_bf16=True)(torch.zeros(2, 16)).any()

"""Codes follow from a decoded weight and its scales, whatever codes and scales they were."""

import torch

from megatron_fp8.numerics.rule import BLOCK_128X128
from megatron_fp8.params.block_codes import codes_of, is_scales_key, scales_key
from megatron_fp8.tensor import QuantizedSide


def test_every_code_under_many_scales():
    """All finite codes, -0 and subnormals too, beside scales of any bits from 2^-60 to 2^60."""
    finite = torch.arange(256, dtype=torch.uint8)
    finite = finite[(finite & 0x7F) != 0x7F]
    rows = finite.repeat(200, 2)[:, :300]  # [200, 300]: the last blocks are cut
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        scale = torch.rand(2, 3, generator=generator) + 1
        scale *= 2.0 ** torch.randint(-60, 60, (2, 3), generator=generator)
        weight = QuantizedSide(rows.view(torch.float8_e4m3fn), scale, BLOCK_128X128, pow2=False).dequantize(
            torch.float32
        )
        again = codes_of(weight, scale)
        assert again.dtype == torch.float8_e4m3fn and torch.equal(again.view(torch.uint8), rows)


def test_names():
    key = scales_key("decoder.layers.0.mlp.linear_fc1.weight_w")
    assert key == "decoder.layers.0.mlp.linear_fc1.fp8_state.weight_w.block_scale_inv"
    assert is_scales_key(key) and not is_scales_key("decoder.layers.0.mlp.linear_fc1.weight_w")

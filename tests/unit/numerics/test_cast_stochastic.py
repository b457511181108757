"""Stochastic rounding: Philox bits from the logical index, exact use of them, no bias, no layout in it."""

import math

import numpy as np
import pytest
import torch

from benchmarks.support import reference
from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.kernels.cast_dispatch import cast, decode
from megatron_fp8.numerics.cast import RandomKey, cast_stochastic, philox_bits
from megatron_fp8.numerics.formats import E4M3, E5M2, Format
from megatron_fp8.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

FORMATS = [pytest.param(E4M3, reference.E4M3, id="e4m3"), pytest.param(E5M2, reference.E5M2, id="e5m2")]
KEY = RandomKey(seed=1234, site=7, iteration=3, microbatch=2)


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    """Random123's published answers for philox4x32, 10 rounds: the oracle's four words, our first word."""
    assert reference.philox4x32_10(counter, key) == expected
    index = torch.tensor([counter[0] | (counter[1] & 0x7FFFFFFF) << 32])
    named = RandomKey(seed=key[0], site=key[1], iteration=counter[2], microbatch=counter[3])
    counter = (counter[0], counter[1] & 0x7FFFFFFF, *counter[2:])  # an int64 index has 63 bits
    assert philox_bits(index, named).item() == reference.philox4x32_10(counter, key)[0]


def test_philox_follows_every_part_of_the_key():
    index = torch.tensor([0, 1, 2, 2**31, 2**32 - 1, 2**32, 2**40 + 5])
    expected = [
        reference.philox4x32_10((int(i) & 0xFFFFFFFF, int(i) >> 32, 3, 2), (1234, 7))[0] for i in index
    ]
    assert philox_bits(index, KEY).tolist() == expected
    streams = [
        KEY,
        RandomKey(1, 7, 3, 2),
        RandomKey(1234, 8, 3, 2),
        RandomKey(1234, 7, 4, 2),
        RandomKey(1234, 7, 3, 1),
    ]
    assert len({tuple(philox_bits(index, key).tolist()) for key in streams}) == len(streams)


@pytest.mark.parametrize("fmt, spec", FORMATS)
def test_rounding_with_given_bits(fmt, spec):
    """From far below the smallest subnormal to saturation, against rational arithmetic."""
    g = torch.Generator().manual_seed(0)
    exponent = torch.randint(-50, 20, (1500,), generator=g).float()
    x = torch.randn(1500, generator=g) * torch.exp2(exponent)
    x[:256] = decode(torch.arange(256, dtype=torch.uint8).view(fmt.dtype)).nan_to_num(nan=1.0)
    words = philox_bits(torch.arange(1500), KEY).tolist()
    expected = [reference.encode_stochastic_one(v, w, spec) for v, w in zip(x.tolist(), words, strict=True)]
    assert_same_bytes(cast_stochastic(x, None, fmt, KEY), np.array(expected, dtype=np.uint8))


@pytest.mark.parametrize("fmt, spec", FORMATS)
@pytest.mark.parametrize("steps", [0.5, 0.01, 2.0**-10, 2.0**-14, 3.3, 5.75])
def test_no_bias(fmt, spec, steps):
    """The mean of many roundings is the value, also for gradients far below the smallest subnormal."""
    n = 1 << 20
    smallest = spec.values()[1]
    value = steps * smallest
    codes = cast_stochastic(torch.full((n,), -value), None, fmt, KEY)
    values = decode(codes, torch.float64)
    chance = steps - math.floor(steps)
    deviation = smallest * math.sqrt(chance * (1 - chance) / n)
    assert abs(values.mean().item() + value) < 5 * deviation
    assert values.unique().numel() == 2


@pytest.mark.parametrize("fmt, spec", FORMATS)
def test_specials_and_exact_values_are_as_in_the_nearest_cast(fmt, spec):
    x = torch.tensor([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 1e30, -1e30, 1.0, -2.0, fmt.max])
    assert_same_bytes(cast_stochastic(x, None, fmt, KEY), cast(x, None, fmt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scale_is_applied_in_float32(dtype):
    x = torch.randn(500, generator=torch.Generator().manual_seed(1)).to(dtype)
    scale = torch.tensor(77.7)
    product = x.float() * scale
    assert_same_bytes(cast_stochastic(x, scale, E5M2, KEY), cast_stochastic(product, None, E5M2, KEY))


def test_bits_belong_to_the_logical_element():
    """Transposed, sliced or cut into shards, an element rounds the same way."""
    x = torch.randn(48, 40, generator=torch.Generator().manual_seed(2))
    whole = cast_stochastic(x, None, E5M2, KEY).view(torch.uint8)
    index = torch.arange(x.numel()).view(x.shape)
    turned = cast_stochastic(x.t(), None, E5M2, KEY, index=index.t())
    assert_same_bytes(turned, whole.t())
    shard = cast_stochastic(x[12:24, 7:], None, E5M2, KEY, index=index[12:24, 7:])
    assert_same_bytes(shard, whole[12:24, 7:])


@pytest.mark.parametrize(
    "recipe",
    [
        Float8CurrentScaling(stochastic_rounding=True),
        Float8BlockScaling(stochastic_rounding=True),
        MXFP8BlockScaling(stochastic_rounding=True, fp8_format=Format.HYBRID),
    ],
    ids=lambda r: type(r).__name__,
)
def test_recipes_round_only_grad_output_stochastically(recipe):
    x = torch.randn(130, 70, generator=torch.Generator().manual_seed(3))
    plain = type(recipe)(fp8_format=recipe.fp8_format)
    for role in ("input", "weight"):
        assert_same_bytes(quantize(x, recipe, role).rowwise.codes, quantize(x, plain, role).rowwise.codes)
    with pytest.raises(ValueError, match="key"):
        quantize(x, recipe, "grad_output")
    first, again = (quantize(x, recipe, "grad_output", "both", key=KEY) for _ in range(2))
    nearest = quantize(x, plain, "grad_output", "both")
    for side in ("rowwise", "columnwise"):
        a, b, n = (getattr(q, side) for q in (first, again, nearest))
        assert_same_bytes(a.codes, b.codes)
        assert_same_bytes(a.scale_inv, n.scale_inv)
        apart = (a.codes.view(torch.uint8).int() - n.codes.view(torch.uint8).int()).abs()
        assert 0.2 < (apart > 0).float().mean() < 0.5 and apart[apart < 0x7F].max() <= 1

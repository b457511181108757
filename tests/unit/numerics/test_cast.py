"""The element cast, saturating round to nearest even of a float32 product, enumerated where possible."""

from __future__ import annotations

import math

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from benchmarks.support import reference
from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels.cast_dispatch import cast
from megatron_fp8.numerics.formats import E4M3, E5M2
from tests.support.draws import draws

FORMATS = [
    pytest.param(E4M3, reference.E4M3, ml_dtypes.float8_e4m3fn, format_info_ocp_e4m3, id="e4m3"),
    pytest.param(E5M2, reference.E5M2, ml_dtypes.float8_e5m2, format_info_ocp_e5m2, id="e5m2"),
]
SPECS = [(E4M3, reference.E4M3), (E5M2, reference.E5M2)]

EVERY_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
EVERY_FP16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
SCALES = [1.0, 0.75, 3.0, 1 / 3, 448.0, 2.0**-9, 2.0**20, 2.0**127, 2.0**-126, 3.4028235e38, 1e-38]


def scale_tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


@pytest.mark.parametrize("value", SCALES, ids=lambda v: f"scale={v:.4g}")
@pytest.mark.parametrize("every", [EVERY_BF16, EVERY_FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("fmt, spec, ml_dtype, info", FORMATS)
def test_every_16_bit_value(fmt, spec, ml_dtype, info, every, value):
    expected = reference.cast(every.float().numpy(), np.float32(value), spec)
    assert_same_bytes(cast(every, scale_tensor(value), fmt), expected, f"cast to {fmt.name} x {value}")


@pytest.mark.parametrize("every", [EVERY_BF16, EVERY_FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("fmt, spec, ml_dtype, info", FORMATS)
def test_every_16_bit_value_against_other_libraries(fmt, spec, ml_dtype, info, every):
    """ml_dtypes (clamped first, it does not saturate) and gfloat, on all values; NaN has one code here."""
    x = every.float().numpy()
    actual = cast(every, None, fmt).view(torch.uint8).numpy()
    number = ~np.isnan(x)
    theirs = np.clip(x[number], -spec.largest, spec.largest).astype(ml_dtype).view(np.uint8)
    assert_same_bytes(actual[number], theirs, "ml_dtypes")
    assert (actual[~number] == 0x7F).all()
    finite = np.isfinite(x)
    rounded = gfloat.round_ndarray(info, x[finite].astype(np.float64), sat=True)
    assert np.array_equal(reference.decode(actual, spec)[finite], rounded)


@pytest.mark.parametrize("fmt, spec, ml_dtype, info", FORMATS)
def test_around_every_code_and_every_midpoint(fmt, spec, ml_dtype, info):
    """float32 values at, one ulp below and one ulp above all representable values and all rounding ties."""
    grid = spec.magnitudes().astype(np.float32)
    points = np.concatenate([grid, (grid[:-1] + grid[1:]) / 2, grid[-1:] * np.float32(1 + 2.0**-5)])
    low, high = np.nextafter(points, np.float32(-np.inf)), np.nextafter(points, np.float32(np.inf))
    x = np.concatenate([points, low, high])
    x = np.concatenate([x, -x])
    expected = np.array([reference.encode_one(float(v), spec) for v in x], dtype=np.uint8)
    assert_same_bytes(reference.encode(x, spec), expected, "the oracle's two encoders")
    assert_same_bytes(cast(torch.from_numpy(x), None, fmt), expected, fmt.name)


@pytest.mark.parametrize("fmt, spec", SPECS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_specials(fmt, spec, dtype):
    top = 0x7E if fmt is E4M3 else 0x7B
    nan_bits = torch.tensor([0x7FC00001, -0x00400001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert nan_bits.isnan().all()
    smallest = spec.values()[1]
    cases = [
        (math.inf, top),
        (-math.inf, top | 0x80),
        (0.0, 0x00),
        (-0.0, 0x80),
        (smallest, 0x01),
        (-smallest, 0x81),
        (smallest / 2, 0x00),  # a tie, and 0 is even
        (-smallest / 2, 0x80),
        (fmt.max, top),
        (fmt.max * 1.0625, top),
        (65504.0, top),
    ]
    x = torch.tensor([v for v, _ in cases], dtype=torch.float64).to(dtype)
    expected = np.array([code for _, code in cases], dtype=np.uint8)
    assert_same_bytes(cast(x, None, fmt), expected, "specials")
    nans = torch.cat([nan_bits.to(dtype), torch.tensor([math.nan, -math.nan], dtype=dtype)])
    assert_same_bytes(cast(nans, None, fmt), np.full(5, 0x7F, dtype=np.uint8), "NaN of either sign")


@pytest.mark.parametrize("fmt, spec", SPECS, ids=["e4m3", "e5m2"])
def test_infinite_times_zero_like_products(fmt, spec):
    """A product that overflows float32 saturates; one that underflows to zero keeps its sign."""
    x = torch.tensor([3e38, -3e38, 1e-45, -1e-45, 1e-38, -1e-38])
    big, small = scale_tensor(3e38), scale_tensor(2.0**-126)
    top = 0x7E if fmt is E4M3 else 0x7B
    assert_same_bytes(cast(x[:2], big, fmt), np.array([top, top | 0x80], dtype=np.uint8), "overflow")
    assert_same_bytes(cast(x[2:], small, fmt), np.array([0, 0x80, 0, 0x80], dtype=np.uint8), "underflow")


def test_subnormal_inputs_are_not_flushed():
    """BF16 and float32 subnormals times 2^127 are ordinary numbers (the scale of a tiny tensor)."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([2.0**-130, -(2.0**-127), 1.5 * 2.0**-128], dtype=torch.float64).to(dtype)
        expected = reference.cast(x.float().numpy(), np.float32(2.0**127), reference.E4M3)
        assert (expected & 0x7F).all()
        assert_same_bytes(cast(x, scale_tensor(2.0**127), E4M3), expected, str(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_product_is_formed_in_float32(dtype):
    """Multiplying in 16 bits would round twice; this data shows the difference, and the cast does not."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = scale_tensor(1.37)
    in_float32 = reference.cast(x.float().numpy(), scale.numpy(), reference.E4M3)
    in_16_bits = reference.encode((x * scale.to(dtype)).float().numpy(), reference.E4M3)
    assert (in_float32 != in_16_bits).mean() > 0.002
    assert_same_bytes(cast(x, scale, E4M3), in_float32)


def test_multiplies_by_the_scale_and_never_divides():
    """x / s and x * (1 / s) are other numbers; only x * scale is the specification."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = scale_tensor(448.0) / x.float().abs().amax()
    expected = reference.cast(x.float().numpy(), scale.numpy(), reference.E4M3)
    divided = reference.encode((x.float() / (1 / scale)).numpy(), reference.E4M3)
    assert (expected != divided).any()
    assert_same_bytes(cast(x, scale, E4M3), expected)


@pytest.mark.parametrize(
    "shape, scale_shape", [((5, 7), (5, 1)), ((5, 7), (1, 7)), ((5, 7), ()), ((0, 7), ())]
)
def test_broadcast_scales(shape, scale_shape):
    g = torch.Generator().manual_seed(2)
    x, scale = torch.randn(shape, generator=g), torch.rand(scale_shape, generator=g) * 100
    actual = cast(x, scale, E4M3)
    assert actual.shape == x.shape and actual.dtype is torch.float8_e4m3fn
    assert_same_bytes(actual, reference.cast(x.numpy(), scale.numpy(), reference.E4M3))


def test_input_is_left_alone_and_strides_do_not_matter():
    x = torch.randn(33, 65, generator=torch.Generator().manual_seed(3)) * 1000
    before = x.clone()
    turned = cast(x.t(), scale_tensor(2.0), E5M2)
    assert_same_bytes(turned, reference.cast(before.numpy().T, np.float32(2), reference.E5M2))
    sliced = cast(x[::2, 1::3], None, E4M3)
    assert_same_bytes(sliced, reference.cast(before.numpy()[::2, 1::3], 1.0, reference.E4M3))
    assert torch.equal(x, before)


@draws(100)
@given(
    x=hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_subnormal=True)),
    scale=st.floats(min_value=2.0**-149, max_value=float(reference.F32_MAX), width=32),
    which=st.sampled_from([0, 1]),
)
def test_any_float32(x, scale, which):
    fmt, spec = SPECS[which]
    actual = cast(torch.from_numpy(x), scale_tensor(scale), fmt)
    assert_same_bytes(actual, reference.cast(x, np.float32(scale), spec), f"{x!r} x {scale!r}")

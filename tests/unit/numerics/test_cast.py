"""The element cast, saturating round to nearest even of a float32 product, enumerated where possible."""

from __future__ import annotations

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

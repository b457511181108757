"""The formats as they are described, against torch.finfo, ml_dtypes, and the tables of the OCP specifications."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron_fp8.study.format_tables import all_formats, intervals

BY_NAME = {one.name: one for one in all_formats()}
DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@pytest.mark.parametrize("name", DTYPES)
def test_limits_are_those_of_finfo(name):
    one, info = BY_NAME[name], torch.finfo(DTYPES[name])
    assert (one.max, one.smallest_normal, one.bits) == (info.max, info.smallest_normal, info.bits)
    assert one.smallest == info.smallest_normal * info.eps and 2.0**-one.mantissa_bits == info.eps


@pytest.mark.parametrize(
    "name, theirs",
    [
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("e8m0", ml_dtypes.float8_e8m0fnu),
        ("e2m1", ml_dtypes.float4_e2m1fn),
        ("bf16", ml_dtypes.bfloat16),
        ("fp16", np.float16),
    ],
)
def test_every_code_has_the_value_that_another_library_gives(name, theirs):
    one = BY_NAME[name]
    codes = np.arange(2**one.bits, dtype=np.uint16 if one.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # NaN, signalling ones too
        expected = codes.view(theirs).astype(np.float64)
    np.testing.assert_array_equal(one.values.numpy(), expected)


@pytest.mark.parametrize(
    "name, theirs",
    [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2), ("e2m1", ml_dtypes.float4_e2m1fn)],
)
def test_rounding_is_to_the_nearest_even(name, theirs):
    one = BY_NAME[name]
    grid = torch.cat([one.positive, (one.positive[1:] + one.positive[:-1]) / 2, one.positive * 1.01])
    grid = grid[grid <= one.max]
    assert one.rounded is not None
    expected = grid.numpy().astype(np.float32).astype(theirs).astype(np.float64)
    np.testing.assert_array_equal(one.rounded(grid).numpy(), expected)
    assert one.rounded(torch.tensor([1e6], dtype=torch.float64)).item() == one.max, "FP8 saturates"


@pytest.mark.parametrize("name, bits", [("e4m3", 3), ("bf16", 7), ("e2m1", 1)])
def test_errors_are_half_a_step_of_the_value_between(name, bits):
    """u / (1 + u) of a value just above a power of two, u half a step; twice that a power of two below the normals."""
    found = {interval.exponent: interval for interval in intervals(BY_NAME[name])}
    u = 2.0 ** -(bits + 1)
    assert (
        found[0].worst_relative_error == pytest.approx(u / (1 + u), rel=1e-12)
        and found[0].spacing == 2.0**-bits
    )
    lowest = math.frexp(BY_NAME[name].smallest)[1] - 1
    assert found[lowest - 1].worst_relative_error == 1 and found[lowest - 1].values == 0, (
        "half the smallest value becomes 0"
    )
    assert found[lowest].worst_relative_error == pytest.approx(1 / 3), (
        "one value, half a step below its double"
    )
    assert sum(interval.values for interval in found.values()) == len(BY_NAME[name].positive)
    assert 0.3 * u < found[0].rms_relative_error < 0.6 * u


def test_scales_have_no_error_of_their_own():
    assert all(interval.worst_relative_error is None for interval in intervals(BY_NAME["e8m0"]))

"""amax, scale, scale_inv and E8M0: every rule at its edges, against rational arithmetic and torchao."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

from benchmarks.support import reference
from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels.cast_dispatch import compute_e8m0
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import compute_amax, compute_scale, compute_scale_inv
from tests.support.draws import draws

FORMATS = [pytest.param(E4M3, reference.E4M3, id="e4m3"), pytest.param(E5M2, reference.E5M2, id="e5m2")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
F32_MAX = float(reference.F32_MAX)


def with_neighbours(points: np.ndarray) -> np.ndarray:
    """float32 points with the float32 one ulp below and one ulp above each; finite, positive, sorted."""
    points = points.astype(np.float32)
    with np.errstate(over="ignore"):
        near = [np.nextafter(points, np.float32(0)), points, np.nextafter(points, np.float32(np.inf))]
    everything = np.unique(np.concatenate(near))
    return everything[(everything > 0) & np.isfinite(everything)]


# All powers of two, and all amaxes at which fp8_max / amax or E8M0's threshold crosses a power of two.
EDGES = with_neighbours(
    np.concatenate([reference.POWERS, *(reference.POWERS * m for m in (1.25, 1.5, 1.75, 1.875))])
)


# --------------------------------------------------------------------------------------------------- amax


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1, -1, (0, 1)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 129), (1000, 3), (0, 5), (5, 0), (0, 0)], ids=str)
def test_amax(shape, dim, dtype):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 7).to(dtype)
    expected = reference.amax(x.float().numpy(), axis=dim)
    actual = compute_amax(x, dim)
    assert actual.dtype is torch.float32
    assert_same_bytes(actual, expected, f"amax over {dim}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_ignores_nan_and_keeps_inf(dtype):
    nan, inf = math.nan, math.inf
    x = torch.tensor(
        [[1.0, -2.0, nan], [nan, nan, nan], [-nan, -inf, 3.0], [0.0, -0.0, nan], [-5.0, nan, 4.0]]
    ).to(dtype)
    assert_same_bytes(compute_amax(x, 1), np.array([2, 0, inf, 0, 5], dtype=np.float32))
    assert compute_amax(x).item() == inf
    assert compute_amax(x[:2]).item() == 2.0
    assert compute_amax(x[1]).item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_reads_through_strides(dtype):
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    for view in (x.t(), x[::3, 1::2], x.expand(3, 40, 64)[1], x[:, :1]):
        assert_same_bytes(compute_amax(view, 1), reference.amax(view.float().numpy(), axis=1))


# -------------------------------------------------------------------------------------------------- scale


@pytest.mark.parametrize("pow2", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("fmt, spec", FORMATS)
def test_scale_at_every_edge(fmt, spec, margin, pow2):
    amax = np.concatenate([EDGES, np.array([0.0, np.inf, F32_MAX], dtype=np.float32)])
    actual = compute_scale(torch.from_numpy(amax), fmt, margin=margin, pow2=pow2)
    expected = reference.scale(amax, spec.largest, margin=margin, pow2=pow2)
    assert actual.dtype is torch.float32
    assert_same_bytes(actual, expected, "scale")
    assert bool(actual.isfinite().all()) and bool((actual > 0).all())


@pytest.mark.parametrize("pow2", [False, True], ids=["fp32", "pow2"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_margin_keeps_headroom_at_every_exponent(fmt, pow2):
    """Against rational arithmetic: the quotient of exact numbers, rounded once, for every exponent and every margin."""
    mantissas = torch.tensor([1, 0x200000, 0x600000, 0x600001, 0x7FFFFF])
    bits = (torch.arange(255)[:, None] << 23) + mantissas
    amax = bits.to(torch.int32).flatten().view(torch.float32)
    largest = Fraction(F32_MAX) if not pow2 else Fraction(2) ** 127
    for margin in (0, 1, 8, 64):
        scale = compute_scale(amax, fmt, margin=margin, pow2=pow2)
        for found, of in zip(scale.tolist(), amax.tolist(), strict=True):
            exact = Fraction(fmt.max) / 2**margin / Fraction(of)
            within = min(max(exact, Fraction(2) ** -126), largest)
            if pow2:
                assert found <= within < 2 * found or found == largest, (margin, of, found)
            else:
                assert abs(Fraction(found) - within) <= Fraction(found) / 2**24, (margin, of, found)
            # Never more than the format holds, less the headroom, but for rounding.
            if exact >= Fraction(2) ** -126:
                reach = Fraction(found) * Fraction(of) * 2**margin
                assert reach <= Fraction(fmt.max) * (1 + Fraction(1, 2**24)), (margin, of, found)


@draws(300)
@given(amax=st.floats(min_value=0, width=32), epsilon=st.floats(0, 2.0**40, width=32), pow2=st.booleans())
def test_scale_of_any_amax(amax, epsilon, pow2):
    for fmt, spec in ((E4M3, reference.E4M3), (E5M2, reference.E5M2)):
        actual = compute_scale(torch.tensor(amax), fmt, epsilon=epsilon, pow2=pow2)
        expected = reference.scale(amax, spec.largest, epsilon=epsilon, pow2=pow2)
        assert_same_bytes(actual, expected, f"{amax!r}")


@pytest.mark.parametrize(
    "amax, options, expected",
    [
        (0.0, {}, 1.0),
        (math.inf, {}, 1.0),
        (math.inf, {"pow2": True}, 1.0),
        (0.0, {"margin": 4}, 1.0),
        (0.0, {"epsilon": 2.0}, 224.0),
        (1.0, {"epsilon": 2.0}, 224.0),
        (4.0, {"epsilon": 2.0}, 112.0),
        (2.0**-149, {}, F32_MAX),
        (2.0**-149, {"pow2": True}, 2.0**127),
        (2.0**-149, {"pow2": True, "margin": 2}, 2.0**127),
        (2.0**-126, {"margin": 8}, 1.75 * 2.0**126),  # 448 / amax overflows: the product has to come first
        (448.0, {}, 1.0),
        (448.0, {"margin": 3}, 0.125),
        (448.0, {"margin": -1}, 2.0),
        (math.nextafter(448.0, 0.0), {"pow2": True}, 1.0),
        (2.0**80, {"margin": 64}, 2.0**-126),  # not subnormal: its inverse would be infinite
        (2.0**127, {"margin": 64, "pow2": True}, 2.0**-126),
        (3.5, {"pow2": True}, 128.0),
        (3.5000002384185791, {"pow2": True}, 64.0),
    ],
)
def test_scale_rules(amax, options, expected):
    assert compute_scale(torch.tensor(amax), E4M3, **options).item() == expected


def test_scale_inv_is_ieee_and_may_be_subnormal():
    scales = np.concatenate([EDGES[EDGES >= 2.0**-126], np.array([F32_MAX], dtype=np.float32)])
    inverse = compute_scale_inv(torch.from_numpy(scales))
    assert_same_bytes(inverse, reference.scale_inv(scales))
    assert 0 < compute_scale_inv(torch.tensor(F32_MAX)).item() < 2.0**-126
    assert compute_scale_inv(torch.tensor(2.0**127)).item() == 2.0**-127


# --------------------------------------------------------------------------------------------------- E8M0


@pytest.mark.parametrize("fmt, spec", FORMATS)
def test_e8m0_at_every_exponent_and_mantissa_edge(fmt, spec):
    """All 256 exponents x the mantissas 0, 1, threshold and its neighbours, all ones; and zero and Inf."""
    mantissa = np.array([0, 1, 2, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFE, 0x7FFFFF], dtype=np.uint32)
    bits = (np.arange(255, dtype=np.uint32)[:, None] << 23 | mantissa).ravel()
    amax = np.concatenate([bits.view(np.float32), EDGES, np.array([np.inf], dtype=np.float32)])
    expected = np.array([reference.e8m0_one(float(a), spec.largest) for a in amax], dtype=np.uint8)
    assert_same_bytes(reference.e8m0(amax, spec.largest), expected, "the oracle's two forms")
    actual = compute_e8m0(torch.from_numpy(amax), fmt)
    assert actual.dtype is torch.uint8
    assert_same_bytes(actual, expected, "e8m0")


@draws(300)
@given(amax=st.floats(min_value=0, width=32))
def test_e8m0_of_any_amax(amax):
    for fmt, spec in ((E4M3, reference.E4M3), (E5M2, reference.E5M2)):
        assert compute_e8m0(torch.tensor(amax), fmt).item() == reference.e8m0_one(amax, spec.largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt, spec", FORMATS)
def test_e8m0_against_torchao(fmt, spec, dtype):
    """torchao's round-up mode, on blocks whose amax walks over all normal edges.

    torchao rounds amax / max to float32 before it takes the ceiling, which can lose the float32 just above
    max * 2^k: those amaxes are left out, and the rational oracle above covers them.
    """
    walk = EDGES[(EDGES > 2.0**-100) & (EDGES < 2.0**120)]
    edges = torch.from_numpy(walk[(walk.view(np.uint32) & 0x7FFFFF) != 0x600001]).to(dtype)
    blocks = torch.rand(edges.numel(), 32, generator=torch.Generator().manual_seed(6)) - 0.5
    blocks = (blocks * edges.float()[:, None]).to(dtype)
    blocks[:, 7] = edges
    theirs, _ = to_mx(blocks, fmt.dtype, 32, ScaleCalculationMode.RCEIL)
    ours = compute_e8m0(compute_amax(blocks, 1), fmt)
    assert_same_bytes(ours, theirs.view(torch.uint8).flatten(), "torchao RCEIL")

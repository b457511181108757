"""What kernels do to single numbers, against cast.py and scaling.py, over every 16-bit input and random float32 bits."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels import device_math
from megatron_fp8.kernels.cast_dispatch import cast, compute_e8m0, e8m0_to_scale
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.scaling import compute_scale, compute_scale_inv
from tests.support.matrices import DEVICE, EVERY_16_BITS, amaxes, random_bits

FORMATS = [pytest.param(E4M3, id="e4m3"), pytest.param(E5M2, id="e5m2")]
BLOCK = 4096


@triton.jit
def encode_all(x, factor, codes, n, E4M3: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = device_math.widen(tl.load(x + at, mask=at < n, other=0.0)) * factor
    tl.store(codes + at, device_math.encode(value, E4M3), mask=at < n)


@triton.jit
def decode_all(codes, values, E4M3: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(values + at, device_math.decode(tl.load(codes + at), E4M3))


@triton.jit
def scale_all(
    amax, scale, inverse, n, epsilon, factor, E4M3: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = device_math.as_bits(tl.load(amax + at, mask=at < n, other=1.0))
    s, inv = device_math.scales(bits, epsilon, factor, E4M3, KIND)
    tl.store(scale + at, s, mask=at < n)
    tl.store(inverse + at, inv, mask=at < n)


@triton.jit
def cast_scale_all(
    amax, scale, n, epsilon, factor, E4M3: tl.constexpr, KIND: tl.constexpr, FINITE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = device_math.as_bits(tl.load(amax + at, mask=at < n, other=1.0))
    tl.store(scale + at, device_math.cast_scale(bits, epsilon, factor, E4M3, KIND, FINITE), mask=at < n)


@triton.jit
def convert_all(x, wide, back, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(wide + at, device_math.widen(value), mask=at < n)
    tl.store(back + at, device_math.narrow(device_math.widen(value) * 1.001, value.dtype), mask=at < n)


def ties(fmt) -> torch.Tensor:
    """float32 at and one ulp beside every code's value and every midpoint between two, both signs."""
    values = torch.arange(0x7F if fmt is E4M3 else 0x7C, dtype=torch.uint8).view(fmt.dtype).to(torch.float32)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([fmt.max * 1.0625, 1e30])])
    beside = torch.cat([(points.view(torch.int32) + d).view(torch.float32) for d in (-1, 0, 1)])
    return torch.cat([beside, -beside])


@pytest.mark.parametrize("fmt", FORMATS)
def test_encode(fmt):
    for name, x in {
        "bfloat16": EVERY_16_BITS.view(torch.bfloat16),
        "float16": EVERY_16_BITS.view(torch.float16),
        "bits": random_bits(50_000),
        "ties": ties(fmt),
    }.items():
        for factor in (1.0, 2.0**-9, 2.0**100, 1 / 3):
            codes = torch.empty(x.shape, dtype=torch.uint8, device=DEVICE)
            grid = (triton.cdiv(x.numel(), BLOCK),)
            encode_all[grid](x.to(DEVICE), factor, codes, x.numel(), fmt is E4M3, BLOCK)
            scale = torch.tensor(factor, dtype=torch.float32)
            assert_same_bytes(codes, cast(x, scale, fmt).view(torch.uint8), f"{fmt.name} {name} x {factor}")


@pytest.mark.parametrize("fmt", FORMATS)
def test_decode(fmt):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = torch.empty(256, device=DEVICE)
    decode_all[(1,)](codes.to(DEVICE), values, fmt is E4M3)
    expected = codes.view(fmt.dtype).to(torch.float32)
    expected.view(torch.int32)[expected.isnan()] = 0x7FC00000  # the one quiet NaN, whatever the code's sign
    assert_same_bytes(values.cpu(), expected, fmt.name)


@pytest.mark.parametrize("kind", ["fp32", "pow2", "e8m0"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_scales(fmt, kind):
    amax = amaxes()
    for margin, epsilon in [(0, 0.0), (0, 1e-3), (6, 0.0), (7, 0.0), (64, 1e-3)]:
        scale = torch.empty_like(amax, device=DEVICE)
        inverse = torch.empty_like(scale)
        if kind == "e8m0":
            inverse = inverse.to(torch.uint8)
        grid = (triton.cdiv(amax.numel(), BLOCK),)
        made = device_math.kind_for(kind, margin)
        scale_all[grid](amax, scale, inverse, amax.numel(), epsilon, 2.0**-margin, fmt is E4M3, made, BLOCK)
        what = f"{fmt.name} {kind} margin {margin} epsilon {epsilon}"
        if kind == "e8m0":
            expected = compute_e8m0(amax, fmt)
            assert_same_bytes(inverse, expected, what)
            assert_same_bytes(scale, e8m0_to_scale(expected), what)
        else:
            expected = compute_scale(amax, fmt, margin=margin, epsilon=epsilon, pow2=kind == "pow2")
            assert_same_bytes(scale, expected, what)
            assert_same_bytes(inverse, compute_scale_inv(expected), f"{what}: inverse")
            assert inverse.isfinite().all() and (inverse > 0).all(), what


@pytest.mark.parametrize("kind", ["fp32", "pow2", "e8m0"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_scales_of_casts(fmt, kind):
    """Those of ``scales``; of an amax of 0 some finite power of two, under which its zeros stay zeros."""
    whole = amaxes()
    for margin, epsilon in [(0, 0.0), (0, 1e-3), (0, 3e38), (6, 0.0), (7, 1e-45)]:
        made = device_math.kind_for(kind, margin)
        for finite in (False, True):
            amax = whole[whole < math.inf] if finite else whole
            scale, expected, inverse = (torch.empty_like(amax, device=DEVICE) for _ in range(3))
            grid, rest = (triton.cdiv(amax.numel(), BLOCK),), (epsilon, 2.0**-margin, fmt is E4M3, made)
            cast_scale_all[grid](amax.to(DEVICE), scale, amax.numel(), *rest, finite, BLOCK)
            inverse = inverse.to(torch.uint8) if kind == "e8m0" else inverse
            scale_all[grid](amax.to(DEVICE), expected, inverse, amax.numel(), *rest, BLOCK)
            some = amax > 0
            assert_same_bytes(scale[some].cpu(), expected[some].cpu(), f"{made} {margin} {epsilon} {finite}")
            assert (scale > 0).all() and scale.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_conversions(dtype):
    """To float32 and, rounded to nearest even, back: what the interpreter's own conversions of bfloat16 get wrong."""
    x = EVERY_16_BITS.view(dtype)
    wide, back = torch.empty(65536, device=DEVICE), torch.empty_like(x, device=DEVICE)
    convert_all[(16,)](x.to(DEVICE), wide, back, 65536, BLOCK)
    wide, back = wide.cpu(), back.cpu()
    number = ~x.isnan()
    assert wide.isnan().equal(~number) and back.isnan().equal(~number)
    assert_same_bytes(wide[number], x.to(torch.float32)[number])
    factor = torch.tensor(1.001)
    assert_same_bytes(back[number], (x.to(torch.float32) * factor).to(dtype)[number])

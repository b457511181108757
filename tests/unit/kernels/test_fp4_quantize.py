"""NVFP4's kernels against numerics/nvfp4.py and backends/fp4.py: every byte of codes and scales, amaxes and counts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import fp4
from megatron_fp8.backends.base import CastRequest, Region
from megatron_fp8.backends.native.placement import swizzle
from megatron_fp8.kernels import fp4_math, fp4_quantize
from megatron_fp8.kernels.device_math import as_bits
from megatron_fp8.kernels.fused_quantize import Swiglu
from megatron_fp8.kernels.quantize import Record, write_matrix
from megatron_fp8.numerics import nvfp4
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.numerics.formats import E2M1
from megatron_fp8.numerics.rule import BLOCK_1X16, BLOCK_16X16, Rule
from megatron_fp8.tensor import QuantizedSide
from tests.support.matrices import (
    DEVICE,
    DTYPES,
    EVERY_16_BITS,
    SHAPES,
    amaxes,
    mixed,
    normalized,
    random_bits,
    strided,
)

BLOCK = 4096
KEY = RandomKey(seed=2**40 + 5, site=2**31 + 9, iteration=3, microbatch=2**32 - 1)
REGIONS = {
    "aligned": Region(KEY, row_offset=3, col_offset=32, total_cols=480),
    "odd": Region(KEY, row_offset=2**20, col_offset=5, total_cols=2**20 + 3),
}
RULES = {
    "1x16": Rule(E2M1, BLOCK_1X16, "e4m3"),
    "1x16 transformed": Rule(E2M1, BLOCK_1X16, "e4m3", hadamard=True),
    "16x16": Rule(E2M1, BLOCK_16X16, "e4m3"),
}
STOCHASTIC = {
    "1x16 transformed": Rule(E2M1, BLOCK_1X16, "e4m3", hadamard=True, stochastic=True),
    "16x16": Rule(E2M1, BLOCK_16X16, "e4m3", stochastic=True),
}


@triton.jit
def encode_all(x, drawn, codes, n, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr):
    at = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    value = tl.reshape(tl.load(x + at, mask=at < n, other=0.0), (1, BLOCK // 8, 8))
    random = 0
    if STOCHASTIC:
        random = tl.reshape(tl.load(drawn + at, mask=at < n, other=0).to(tl.int32), (1, BLOCK // 8, 8))
    words = fp4_math.words_of(value, random, STOCHASTIC)
    word = (tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8))[None, :]
    tl.store(codes + word, words, mask=word * 8 < n)


@triton.jit
def scale_all(amax, tensor_amax, codes, factors, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = as_bits(tl.load(amax + at, mask=at < n, other=1.0))
    code, factor = fp4_math.block_scales(bits, tl.load(tensor_amax))
    tl.store(codes + at, code, mask=at < n)
    tl.store(factors + at, factor, mask=at < n)


def encoded(x: torch.Tensor, drawn: torch.Tensor | None) -> torch.Tensor:
    """Codes by the kernel, two a byte, of float32 numbers."""
    words = torch.empty(x.numel() // 8, dtype=torch.int32, device=DEVICE)
    grid = (triton.cdiv(x.numel(), BLOCK),)
    encode_all[grid](
        x.to(DEVICE), None if drawn is None else drawn.to(DEVICE), words, x.numel(), drawn is not None, BLOCK
    )
    return words.cpu().view(torch.uint8)


def numbers() -> torch.Tensor:
    """float32: every bfloat16 number, codes' borders with their neighbours, random bits; no NaN."""
    borders = torch.tensor([v / 8 for v in range(56)])
    near = torch.cat([(borders.view(torch.int32) + d).view(torch.float32) for d in (-1, 0, 1)])
    many = torch.cat([near, -near, random_bits(20_000), torch.randn(20_000) * 3])
    many = torch.cat([EVERY_16_BITS.view(torch.bfloat16).to(torch.float32), many])
    many = many[~many.isnan()]
    return many[: many.numel() // 8 * 8]


def test_codes():
    x = numbers()
    assert_same_bytes(encoded(x, None), nvfp4.pack(nvfp4.encode(x[None]))[0].view(torch.uint8))


def test_codes_rounded_stochastically():
    x = numbers()
    drawn = torch.randint(0, 256, x.shape, generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    near_half = torch.tensor([0.25 - 2.0**-26, 0.5 - 2.0**-26, 1.0 - 2.0**-25, 3.999, 5.999, 6.0, -0.0, 7.0])
    x = torch.cat([x, near_half.repeat(256)])
    drawn = torch.cat([drawn, torch.arange(256).repeat_interleave(8).to(torch.uint8)])
    expected = nvfp4.pack(nvfp4.encode(x[None], drawn[None]))[0].view(torch.uint8)
    assert_same_bytes(encoded(x, drawn), expected)


def near_ties(tensor_amax: torch.Tensor) -> torch.Tensor:
    """Block amaxes whose scales are halfway between two E4M3 numbers, and their neighbours."""
    codes = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    factor = float(nvfp4.tensor_scale(tensor_amax) * torch.tensor(1 / 6))
    bits = ((codes[1:] + codes[:-1]) / 2 / factor).float().view(torch.int32)
    return torch.cat([(bits + d).clamp(min=0).view(torch.float32) for d in range(-2, 3)])


@pytest.mark.parametrize(
    "tensor_amax", [0.0, 2.0**-149, 2.0**-130, 1e-3, 1.1, 1.9, 2.3, 3.7, 7.0, 2688.0, 1e38]
)
def test_scales(tensor_amax):
    of_tensor = torch.tensor(tensor_amax)
    amax = torch.cat([amaxes(), near_ties(of_tensor)])
    codes = torch.empty(amax.numel(), dtype=torch.uint8, device=DEVICE)
    factors = torch.empty(amax.numel(), device=DEVICE)
    scale_all[(triton.cdiv(amax.numel(), BLOCK),)](
        amax.to(DEVICE), of_tensor.to(DEVICE), codes, factors, amax.numel(), BLOCK
    )
    expected = nvfp4.block_scales(amax, of_tensor)
    assert_same_bytes(codes.cpu(), expected.view(torch.uint8))
    assert_same_bytes(factors.cpu(), nvfp4.encoding_factors(expected, of_tensor))


def test_product_factor():
    """The specification's bits where the amaxes' product rounds, is subnormal, 0 or Inf; and 1 for the other operand."""
    of_a = torch.tensor([2688.0, 3.3, 1e-30, 1e-20, 0.0, 3e38, 7.1e-3])
    for a in of_a.to(DEVICE):
        for b in of_a.to(DEVICE):
            side = QuantizedSide(torch.empty(0), torch.empty(0), BLOCK_1X16, False, tensor_amax=a)
            factor, one = fp4_quantize.product_factor(a, b)
            assert_same_bytes(factor, fp4.tensor_factor(side, replace(side, tensor_amax=b)), f"{a} {b}")
            assert one == 1


def kernel_casts(x, rule, direction="both", region=None, reduce=None, **options):
    """(sides, record) by the kernels."""
    record = Record.new(DEVICE)
    found = fp4_quantize.find_amaxes(
        x,
        transformed=rule.hadamard and direction != "rowwise",
        nonfinite=record.nonfinite,
        running=record.amax,
    )
    if reduce is not None:
        reduce(found)
    draws = None
    if region is not None:
        step = region.total_cols
        draws = fp4_quantize.Draws(region.key, region.row_offset * step + region.col_offset, step)
    how = {"square": rule.granularity.symmetric, "transformed": rule.hadamard, "draws": draws}
    return fp4_quantize.cast(x, direction, found, **how, **options), record


def assert_as_specified(x, rule, what, direction="both", region=None, reduce=None, source=None):
    with torch.no_grad():
        expected = fp4.quantize(CastRequest(x.cpu(), rule, direction, region=region, reduce_amax=reduce))
    sides, record = kernel_casts(x if source is None else source, rule, direction, region, reduce)
    for name, mine, theirs in zip(("row", "column"), sides, expected.tensor.sides, strict=True):
        assert (mine is None) == (theirs is None), f"{what} {name}"
        if mine is not None:
            assert_same_bytes(_bytes(mine.scales), _bytes(theirs.scale_inv), f"{what} {name} scales")
            assert_same_bytes(_bytes(mine.codes), _bytes(theirs.codes), f"{what} {name} codes")
            assert_same_bytes(mine.amax.cpu(), theirs.tensor_amax.clone(), f"{what} {name} amax")
    assert_same_bytes(record.amax.cpu(), expected.amax.clone(), f"{what} amax")
    assert int(record.nonfinite) == int(expected.nonfinite or 0), f"{what} count"


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_casts(name, shape):
    for i, special in enumerate((False, True, True)):
        x = mixed(shape, DTYPES[(SHAPES.index(shape) + i) % 3], special)
        assert_as_specified(x, RULES[name], f"{name} {shape} {x.dtype} special={special}")


@pytest.mark.parametrize(("name", "where"), list(product(STOCHASTIC, REGIONS)))
def test_casts_rounded_stochastically(name, where):
    for i, shape in enumerate(((7, 33), (130, 160))):
        for special in (False, True):
            x = mixed(shape, DTYPES[(i + special) % 3], special)
            assert_as_specified(x, STOCHASTIC[name], f"{shape} {special}", region=REGIONS[where])


@pytest.mark.parametrize("name", RULES)
def test_one_direction(name):
    x = mixed((130, 72), torch.bfloat16, special=True)
    for direction in ("rowwise", "columnwise"):
        assert_as_specified(x, RULES[name], direction, direction)
        rule = STOCHASTIC.get(name)
        if rule is not None:
            assert_as_specified(x, rule, f"stochastic {direction}", direction, REGIONS["aligned"])


def test_numbers_that_overflow_in_the_transform():
    """Sums of finite numbers that are Inf, and differences of those, NaN."""
    x = torch.full((48, 40), 3e38, dtype=torch.bfloat16)
    x[::3, ::5] *= -1
    x[:, 20:] = torch.finfo(torch.bfloat16).smallest_normal / 4
    assert_as_specified(x, RULES["1x16 transformed"], "overflow")


def test_amaxes_reduced_over_ranks():
    """A tensor's amax may be larger than any of its shard's, or Inf."""
    x = mixed((40, 50), torch.bfloat16)
    for factors in ((2.0, 3.0), (math.inf, 1.0), (1.0, math.inf)):
        assert_as_specified(
            x,
            RULES["1x16 transformed"],
            str(factors),
            reduce=lambda amaxes, factors=factors: amaxes.mul_(torch.tensor(factors)),
        )


def test_strided_rows():
    x = mixed((65, 130), torch.bfloat16, special=True)
    for view in (strided(x), x.t().contiguous().t()):
        assert_as_specified(x, RULES["1x16 transformed"], "strided", source=view)


def test_computed_matrices():
    """Norm and SwiGLU, computed while they are read."""
    x, weight = mixed((40, 130), torch.bfloat16), mixed((1, 130), torch.bfloat16)[0]
    for source in (normalized(x, weight), Swiglu(x)):
        assert_as_specified(write_matrix(source), RULES["1x16 transformed"], source.kind, source=source)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(7, 33), (200, 129), (300, 260)], ids=str)
def test_layout_for_products(name, shape):
    """Codes reach to multiples of 32, scales are in the product's tiles to their ends; all else is as without."""
    x, rule = mixed(shape, torch.bfloat16, special=True), RULES[name]
    plain, _ = kernel_casts(x, rule)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    try:
        found, _ = kernel_casts(x, rule, tiled=True, pad_to=32, room=16)
    finally:
        torch.use_deterministic_algorithms(False)
    for mine, theirs, (rows, cols) in zip(found, plain, (shape, shape[::-1]), strict=True):
        across = theirs.codes.shape[1]
        codes, expected = mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8)
        assert codes.shape == (rows, -(-cols // 32) * 16)
        assert codes.untyped_storage().nbytes() == -(-rows // 16) * 16 * codes.shape[1]
        assert_same_bytes(codes[:, :across].contiguous(), expected, "codes")
        assert not (codes[:, across:] & 0x77).any(), "not zeros"
        scales = theirs.scales.view(torch.uint8)
        if rule.granularity.symmetric:
            scales = scales.repeat_interleave(16, 0)[:rows]
        assert_same_bytes(mine.scales.view(torch.uint8), swizzle(scales, 0), "scales")


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(shape):
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    for name, rule in RULES.items():
        assert_as_specified(x, rule, name)

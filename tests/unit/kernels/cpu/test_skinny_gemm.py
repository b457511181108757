"""Products of few rows by codes: every code exact, sums in the order of products with many rows, each row on its own."""

from __future__ import annotations

import math
import platform

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.kernels.cast_dispatch import cast, decode, decode_blocks
from megatron_fp8.kernels.cpu import emulation, skinny_gemm
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_128X128, ROW, TENSOR
from megatron_fp8.tensor import QuantizedSide
from tests.support.threads import threads

ONE = torch.ones(())
FORMATS = [pytest.param(E4M3, id="e4m3"), pytest.param(E5M2, id="e5m2")]
NAMES = {emulation.AVX512: "avx512", emulation.AMX: "amx", emulation.FLOAT32: "float32"}


@pytest.fixture(params=NAMES, ids=NAMES.values())
def loop(request):
    if request.param not in skinny_gemm.inner_loops():
        pytest.skip(f"this processor does not multiply by {NAMES[request.param]}")
    return request.param


def matrix(rows: int, k: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def many_rows(loop: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 sums of the product with many rows that has this order."""
    found = emulation.multiply(emulation.Operand(a), emulation.Operand(b), torch.float32, loop=loop)
    assert found is not None
    return found


def multiply(loop: int, a: torch.Tensor, codes: torch.Tensor, **given) -> torch.Tensor:
    facts = {"scale_a": ONE, "scale_b": ONE, "bias": None, "dtype": torch.float32} | given
    return skinny_gemm.matmul(a, codes, loop=loop, **facts)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_code_becomes_the_number_that_it_stands_for(loop, fmt):
    """Subnormal codes, Inf and NaN too, wherever in a row they are."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype)
    for k, at in ((1, 0), (200, 77), (200, 199)):
        b = torch.zeros(256, k, dtype=torch.uint8).view(fmt.dtype)
        b[:, at] = codes
        a = torch.zeros(1, k, dtype=torch.bfloat16)
        a[0, at] = 1
        found = multiply(loop, a, b)[0]
        expected = decode(codes)
        assert torch.equal(found.isnan(), expected.isnan()) and int(found.isnan().sum()) in (2, 6)
        assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])
        assert_same_bytes(
            multiply(loop, a, b, dtype=torch.bfloat16)[0] + 0, decode(codes, torch.bfloat16) + 0
        )
        # by the other way to decode: a row of normal codes, a row with zeros
        known = codes[expected.isfinite()]
        b = torch.full((len(known), k), 0x38, dtype=torch.uint8).view(fmt.dtype)
        b[:, at] = known
        assert_same_bytes(multiply(loop, a, b, finite=True)[0] + 0, decode(known) + 0)


def test_large_numbers_stay_finite(loop):
    """E4M3's codes may be decoded 2^8 too small, which is no reason to multiply bfloat16 numbers by 2^8."""
    a, codes = torch.full((3, 128), 2.0**120).bfloat16(), torch.full((40, 128), 2.0**-6).to(E4M3.dtype)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(multiply(loop, a, codes, dtype=dtype), torch.full((3, 40), 2.0**121, dtype=dtype))
    if loop == emulation.FLOAT32:
        assert torch.equal(many_rows(loop, a, codes), torch.full((3, 40), 2.0**121))


@pytest.mark.parametrize("shape", [(1, 1), (31, 63), (32, 64), (33, 65), (97, 1100), (256, 512)], ids=str)
def test_sums_are_those_of_the_product_with_many_rows(loop, shape):
    n, k = shape
    codes = cast(matrix(n, k, 1), ONE, E4M3)
    a = matrix(64, k, 2)
    whole = many_rows(loop, a, decode(codes, torch.bfloat16))
    for finite in (False, True):
        for rows in (1, 2, 3, 7, 8, 15, 16):
            found = multiply(loop, a[:rows], codes, finite=finite)
            assert_same_bytes(found, whole[:rows], f"{rows} rows")
        assert_same_bytes(multiply(loop, a[63:], codes, finite=finite), whole[63:])


@pytest.mark.parametrize("block", [(1, 32), (128, 128), (1, 64)], ids=str)
def test_powers_of_two_along_the_contraction(loop, block):
    n, k = 150, 1130
    shape = -(-n // block[0]), -(-k // block[1])
    codes = cast(matrix(n, k, 3), ONE, E4M3)
    codes[3] = 0
    exponents = torch.randint(90, 160, shape, generator=torch.Generator().manual_seed(4)).to(torch.uint8)
    values = decode_blocks(codes, exponents.view(torch.float8_e8m0fnu), block, torch.bfloat16)
    a = matrix(9, k, 5)
    whole = many_rows(loop, a, values)
    for rows in (1, 2, 4, 8, 9):
        found = multiply(loop, a[:rows], codes, exponents=exponents, block=block, finite=True)
        assert_same_bytes(found, whole[:rows], f"{rows} rows")


@pytest.mark.parametrize("block", [(1, 32), (128, 128)], ids=str)
def test_nan_and_inf_of_few_rows_stay_under_exponents(loop, block):
    """Whichever side the powers of two are put into; and zeros under the smallest one give zeros."""
    n, k = 64, 160
    exponents = torch.full((-(-n // block[0]), -(-k // block[1])), 120, dtype=torch.uint8)
    exponents[:, 0] = 0
    b = torch.ones(n, k)
    b[:, : block[1]] = 0
    a = torch.ones(3, k, dtype=torch.bfloat16)
    a[1, -1], a[2, -1] = torch.nan, -torch.inf
    a[0, : block[1]] = 0.75  # its exponent and that of the smallest scale would make Inf
    found = multiply(loop, a, cast(b, ONE, E4M3), exponents=exponents, block=block, finite=True)
    assert torch.equal(found[0], torch.full((n,), (k - block[1]) / 128.0))
    assert bool(found[1].isnan().all()) and bool((found[2] == -torch.inf).all())


@pytest.mark.parametrize("block", [(1, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_numbers_at_the_limits_of_what_scales_may_be(loop, fmt, block):
    """The smallest and the largest code of a under scales whose product is the least or the most that is folded."""
    n, k = 128, 128
    least, most = emulated._SMALLEST_SCALE, emulated._LARGEST_SCALE
    ones = cast(torch.ones(n, k), ONE, E4M3)
    for of_a, of_b in ((least**0.5, least**0.5), (least, 1.0), (1.0, least), (most, 1.0), (1.0, most)):
        exponents = torch.full((-(-n // block[0]), -(-k // block[1])), 127 + int(math.log2(of_b)))
        a = torch.zeros(4, k, dtype=torch.bfloat16)
        a[0, 5], a[1, 70], a[2, 127] = -of_a * fmt.smallest, of_a * fmt.max, of_a * -1.5
        found = multiply(loop, a, ones, exponents=exponents.to(torch.uint8), block=block, finite=True)
        expected = (a.double().sum(1, keepdim=True) * of_b).expand(-1, n)
        assert torch.equal(found.double(), expected), (of_a, of_b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_scales_and_bias_are_float32_and_one_rounding(loop, biased, dtype):
    n, k, m = 70, 300, 5
    codes, a = cast(matrix(n, k, 6), ONE, E4M3), matrix(m, k, 7)
    generator = torch.Generator().manual_seed(8)
    bias = torch.randn(n, generator=generator) if biased else None
    sums = many_rows(loop, a, decode(codes, torch.bfloat16))
    for scale_a, scale_b in (((), ()), ((m, 1), (n, 1)), ((m, 1), ())):
        scales = [torch.rand(shape, generator=generator) for shape in (scale_a, scale_b)]
        expected = sums * (scales[0] * (scales[1].t() if scales[1].ndim else scales[1]))
        expected = expected if bias is None else expected + bias
        found = multiply(loop, a, codes, scale_a=scales[0], scale_b=scales[1], bias=bias, dtype=dtype)
        assert_same_bytes(found, expected.to(dtype))


def test_threads_change_nothing(loop):
    codes, a = cast(matrix(300, 700, 9), ONE, E4M3), matrix(4, 700, 10)
    with threads(1):
        alone = multiply(loop, a, codes)
    with threads(3):
        assert_same_bytes(multiply(loop, a, codes), alone)


SIDES = {
    "tensor": (TENSOR, (), False),
    "row": (ROW, (160, 1), True),
    "block": (BLOCK_128X128, (2, 2), True),
    "mx": (BLOCK_1X32, (160, 8), True),
}


@pytest.mark.parametrize("kind", SIDES)
def test_gemm_goes_this_way_by_its_shape(kind, monkeypatch):
    """With few rows and many values, whatever the scales; a side whose codes lie otherwise goes the other way."""
    granularity, shape, pow2 = SIDES[kind]
    calls = []
    matmul = skinny_gemm.matmul
    monkeypatch.setattr(
        skinny_gemm, "matmul", lambda a, *_, **given: calls.append(len(a)) or matmul(a, *_, **given)
    )
    exponents = torch.randint(100, 140, shape, generator=torch.Generator().manual_seed(11)).to(torch.uint8)
    scale = exponents.view(torch.float8_e8m0fnu) if kind == "mx" else torch.exp2(exponents.float() - 127)
    b = QuantizedSide(cast(matrix(160, 250, 12), ONE, E4M3), scale, granularity, pow2, True)
    for rows in (1, 16, 17):
        a = QuantizedSide(cast(matrix(rows, 250, 13), ONE, E4M3), ONE * 0.3, TENSOR, False, True)
        for dtype in (torch.float32, torch.bfloat16):
            exact = emulated.gemm(a, b, out_dtype=torch.float64, exact=True)
            found = emulated.gemm(a, b, out_dtype=dtype)
            torch.testing.assert_close(
                found.double(), exact, rtol=2**-7, atol=float(exact.abs().max()) * 1e-5
            )
    assert calls == ([1, 1, 16, 16] if skinny_gemm.inner_loops() else [])
    turned = QuantizedSide(b.codes.t().contiguous().t(), b.scale_inv, granularity, pow2, True)
    emulated.gemm(a, turned)
    emulated.gemm(QuantizedSide(a.codes[:1], a.scale_inv, TENSOR, False, True), turned)
    assert len(calls) == (4 if skinny_gemm.inner_loops() else 0)


def test_is_used_where_the_processor_has_it():
    """A silent return to the slow way would pass every other test."""
    flags = set(open("/proc/cpuinfo").read().split())  # noqa: SIM115
    expected = [emulation.AVX512] if {"avx512_bf16", "avx512vbmi", "gfni"} <= flags else []
    expected += [emulation.AMX] * bool(expected and "amx_bf16" in flags)
    expected += [emulation.FLOAT32] * ({"avx2", "fma", "f16c"} <= flags or platform.machine() == "aarch64")
    assert sorted(skinny_gemm.inner_loops()) == expected

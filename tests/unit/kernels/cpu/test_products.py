"""Products of codes that are decoded on the way into the GEMM's panels, by each inner loop that this processor has."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends.emulated import values64
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.kernels.cpu.emulation import AMX, AVX512, FLOAT32, Operand
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Granularity
from megatron_fp8.tensor import QuantizedSide
from tests.support.threads import threads

KINDS = {
    "bfloat16": None,
    "tensor": (TENSOR, "fp32"),
    "row": (ROW, "pow2"),
    "row fp32": (ROW, "fp32"),
    "1x128": (BLOCK_1X128, "pow2"),
    "128x128": (BLOCK_128X128, "pow2"),
    "1x32": (BLOCK_1X32, "e8m0"),
    "1x96": (Granularity(1, 96), "pow2"),
    "64x160": (Granularity(64, 160), "pow2"),
}
USUAL = list(KINDS)[:-2]
PAIRS = [*itertools.product(USUAL, USUAL), ("1x96", "1x96"), ("64x160", "1x32"), ("1x96", "64x160")]
SHAPES = [(1, 1, 1), (2, 130, 33), (130, 3, 65), (17, 45, 130), (48, 64, 128), (33, 31, 31), (70, 129, 600)]


@pytest.fixture(params=[AVX512, AMX, FLOAT32], ids=["avx512", "amx", "float32"])
def loop(request) -> int:
    if request.param not in emulation.inner_loops():
        pytest.skip("not an instruction of this processor")
    return request.param


def side(
    kind: str, rows: int, k: int, dtype: torch.dtype, turned: bool, seed: int
) -> tuple[Operand, torch.Tensor]:
    """(an operand of any codes but NaN and Inf; float64 [rows, k], what it stands for)."""
    generator = torch.Generator().manual_seed(seed)
    if KINDS[kind] is None:
        x = torch.randn(rows, k, generator=generator).bfloat16()
        x = x.t().contiguous().t() if turned else x
        return Operand(x), x.double()
    granularity, scales = KINDS[kind]
    most = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}[dtype]
    codes = torch.randint(0, most, (rows, k), generator=generator, dtype=torch.uint8)
    codes = (codes | torch.randint(0, 2, codes.shape, generator=generator, dtype=torch.uint8) << 7).view(
        dtype
    )
    shape = [
        -(-n // (b or n)) for n, b in zip(codes.shape, (granularity.rows, granularity.cols), strict=True)
    ]
    exponents = torch.randint(-20, 12, shape, generator=generator)
    if scales == "e8m0":
        scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        scale = torch.exp2(exponents.float()) * (1.0 if scales == "pow2" else 1.3)
    scale = scale.view([]) if granularity.is_tensor else scale
    if turned:
        codes = codes.view(torch.uint8).t().contiguous().view(dtype).t()
        scale = (
            scale if granularity.is_tensor else scale.view(torch.uint8 if scales == "e8m0" else torch.float32)
        )
        scale = scale if granularity.is_tensor else scale.t().contiguous().t()
        scale = scale.view(torch.float8_e8m0fnu) if scales == "e8m0" else scale
    whole = QuantizedSide(codes, scale, granularity, scales != "fp32")
    return Operand(codes, scale, (granularity.rows, granularity.cols), scales != "fp32"), values64(whole)


@pytest.mark.parametrize(("kind_a", "kind_b"), PAIRS)
def test_against_float64(kind_a: str, kind_b: str, loop: int):
    """All shapes, both orders in memory of each operand, both results, with and without a bias."""
    ways = itertools.product([False, True], [False, True], [torch.float32, torch.bfloat16])
    for (m, n, k), (turned_a, turned_b, dtype) in itertools.product(SHAPES, ways):
        a, exact_a = side(kind_a, m, k, torch.float8_e5m2, turned_a, m)
        b, exact_b = side(kind_b, n, k, torch.float8_e4m3fn, turned_b, n + 1)
        bias = torch.linspace(-1, 1, n) if turned_a else None
        found = emulation.multiply(a, b, dtype, bias, loop=loop)
        assert found is not None and found.dtype == dtype
        if dtype == torch.float32:
            known = a._replace(finite=True), b._replace(finite=True)
            assert_same_bytes(emulation.multiply(*known, dtype, bias, loop=loop), found)
        exact = exact_a @ exact_b.t() + (0 if bias is None else bias.double())
        size = exact_a.abs() @ exact_b.abs().t() + (0 if bias is None else bias.double().abs())
        allowed = (k + 4) * 2.0**-24 * size + (2.0**-8 * exact.abs() if dtype == torch.bfloat16 else 0)
        assert ((found.double() - exact).abs() <= allowed).all(), (m, n, k, turned_a, turned_b, dtype)


def test_every_code_is_decoded(loop: int):
    """Times one: subnormals are exact, Inf and NaN are seen in their row alone."""
    for dtype, turned in itertools.product([torch.float8_e4m3fn, torch.float8_e5m2], [False, True]):
        codes = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 33)
        codes[:, 1:] = 0
        codes = codes.t().contiguous().t() if turned else codes
        ones = torch.ones(5, 33, dtype=torch.bfloat16)
        for shift in (0, -60, 60):
            scale = torch.full((256, 1), 2.0**shift)
            a = Operand(codes.view(dtype), scale, (1, 128), True)
            found = emulation.multiply(a, Operand(ones), torch.float32, loop=loop)
            expected = codes[:, :1].view(dtype).double() * 2.0**shift
            torch.testing.assert_close(found.double(), expected.expand(-1, 5), rtol=0, atol=0, equal_nan=True)


def test_codes_known_to_be_finite_reach_both_ends_of_the_range(loop: int):
    """Zeros and subnormals too; where a row is known to hold no NaN its powers of two are taken another way."""
    for dtype, turned in itertools.product([torch.float8_e4m3fn, torch.float8_e5m2], [False, True]):
        most = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}[dtype]
        codes = torch.tensor([i for i in range(256) if i & 0x7F < most], dtype=torch.uint8)[:, None]
        codes = codes.repeat(1, 32)
        codes[:, 1:] = 0
        rows = len(codes)
        codes = codes.t().contiguous().t() if turned else codes
        ones = torch.ones(5, 32, dtype=torch.bfloat16)
        for exponent in (-100, -1, 0, 1, 78):
            scale = torch.full((rows, 1), 2.0**exponent)
            a = Operand(codes.view(dtype), scale, (1, 32), True, finite=True)
            found = emulation.multiply(a, Operand(ones), torch.float32, loop=loop)
            expected = codes[:, :1].view(dtype).double() * 2.0**exponent
            assert torch.equal(found.double(), expected.expand(-1, 5)), (dtype, turned, exponent)


def test_an_element_depends_on_its_row_and_column_alone(loop: int):
    a, _ = side("1x32", 301, 1100, torch.float8_e5m2, True, 1)
    b, _ = side("128x128", 97, 1100, torch.float8_e4m3fn, False, 2)
    whole = emulation.multiply(a, b, torch.float32, loop=loop)
    for count in (1, 2, 3, 4):
        with threads(count):
            assert torch.equal(emulation.multiply(a, b, torch.float32, loop=loop), whole)
    part = a._replace(values=a.values[128:161], scale=a.scale[128:161])
    assert torch.equal(emulation.multiply(part, b, torch.float32, loop=loop), whole[128:161])


def test_scales_that_bfloat16_has_no_room_for_are_refused(loop: int):
    codes = torch.full((4, 64), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    plain = Operand(codes, torch.ones(()), (0, 0), False)
    for bad in (2.0**-101, 2.0**81, float("nan"), float("inf"), 0.0):
        scales = torch.ones(4, 2)
        scales[3, 1] = bad
        assert (
            emulation.multiply(Operand(codes, scales, (1, 32), True), plain, torch.float32, loop=loop) is None
        )
        assert (
            emulation.multiply(plain, plain._replace(scale=torch.tensor(bad)), torch.float32, loop=loop)
            is None
        )
    small = Operand(codes, torch.full((4, 2), 2.0**-60), (1, 32), True)
    assert emulation.multiply(small, small, torch.float32, loop=loop) is None


def test_a_block_of_zeros_under_the_smallest_scale_of_mx_is_zeros(loop: int):
    codes = torch.full((4, 64), 0x38, dtype=torch.uint8)
    codes[2, 32:] = 0x80
    exponents = torch.full((4, 2), 127, dtype=torch.uint8)
    exponents[2, 1] = 0
    ones = Operand(torch.ones(3, 64, dtype=torch.bfloat16))

    def product() -> torch.Tensor | None:
        scale = exponents.view(torch.float8_e8m0fnu)
        a = Operand(codes.view(torch.float8_e4m3fn), scale, (1, 32), True)
        return emulation.multiply(a, ones, torch.float32, loop=loop)

    assert product().tolist() == [[64.0] * 3, [64.0] * 3, [32.0] * 3, [64.0] * 3]
    codes[2, 40] = 1
    assert product() is None


def test_what_is_not_taken():
    codes = torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
    good = Operand(codes, torch.ones(256, 8), (1, 32), True)
    assert emulation.fits(good, good)
    for bad in (
        good._replace(pow2=False),
        good._replace(block=(1, 16), scale=torch.ones(256, 16)),
        good._replace(values=codes.to("meta")),
        good._replace(values=codes.to(torch.float32)),
    ):
        assert not emulation.fits(good, bad) and not emulation.fits(bad, good)
    assert not emulation.fits(*[Operand(codes[:4], torch.ones(4, 8), (1, 32), True)] * 2)


@pytest.mark.parametrize(
    "scale",
    [torch.ones(256, 7), torch.ones(255, 8), torch.ones(2048), torch.ones(256, 8, dtype=torch.float64)],
    ids=["fewer of k", "fewer of rows", "in a row", "another dtype"],
)
def test_scales_that_are_not_one_for_each_block_are_not_read(loop: int, scale: torch.Tensor) -> None:
    """C would read past their end."""
    codes = torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
    good = Operand(codes, torch.ones(256, 8), (1, 32), True)
    with pytest.raises(AssertionError, match=r"scales \[256, 8\] of float32 or E8M0 are needed"):
        emulation.multiply(good, good._replace(scale=scale), torch.float32, loop=loop)


def test_matrices_that_do_not_fit_are_not_read(loop: int) -> None:
    a, b = (Operand(torch.ones(8, k, dtype=torch.bfloat16)) for k in (64, 63))
    with pytest.raises(AssertionError):
        emulation.multiply(a, b, torch.float32, loop=loop)
    with pytest.raises(AssertionError):
        emulation.multiply(a, a, torch.float32, into=torch.zeros(8, 7), loop=loop)


def test_a_limit_on_torch_s_instructions_holds_here(monkeypatch: pytest.MonkeyPatch):
    looked_up = emulation.inner_loop.__wrapped__
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "avx512_core_bf16")
    others = [loop for loop in emulation.inner_loops() if loop != AMX]
    assert looked_up() == (others or [None])[0]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert looked_up() == (emulation.inner_loops() or (None,))[0]


def test_a_product_is_added_to_what_is_there(loop: int):
    """The bits of a sum afterwards."""
    a, _ = side("1x32", 70, 200, torch.float8_e5m2, True, 1)
    b, _ = side("tensor", 45, 200, torch.float8_e4m3fn, True, 2)
    there = torch.randn(70, 45)
    expected = there + emulation.multiply(a, b, torch.float32, loop=loop)
    assert emulation.multiply(a, b, torch.float32, into=there, loop=loop) is there
    assert torch.equal(there, expected)

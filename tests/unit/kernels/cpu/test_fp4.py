"""NVFP4 casts and decoding in C: the specification's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megatron_fp8.backends import emulated, fp4
from megatron_fp8.backends.base import CastResult, Region, RunningAmax
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.kernels.cpu import fp4 as in_c
from megatron_fp8.kernels.cpu.emulation import Operand
from megatron_fp8.numerics import nvfp4
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.numerics.rule import Rule
from megatron_fp8.recipe import NVFP4BlockScaling
from megatron_fp8.tensor import QuantizedSide, expand_scale
from tests.support.cast_inputs import matrix
from tests.support.threads import threads

pytestmark = pytest.mark.skipif(emulation.reason() is not None, reason="no C compiler")

RULES = {
    "rows": NVFP4BlockScaling().rule("input"),
    "squares": NVFP4BlockScaling().rule("weight"),
    "stochastic": NVFP4BlockScaling().rule("grad_output"),
    "plain": NVFP4BlockScaling(disable_rht=True).rule("input"),
    "plain stochastic": NVFP4BlockScaling(disable_rht=True).rule("grad_output"),
    "stochastic squares": replace(NVFP4BlockScaling().rule("weight"), stochastic=True),
}
SHAPES = [(1, 40), (16, 16), (7, 33), (129, 257), (300, 70), (128, 256), (40, 600)]
FACTS = "granularity", "pow2", "finite", "padding", "hadamard"
REGIONS = [Region(RandomKey(5, 6, 7, 8)), Region(RandomKey(-5, -1, 7, 8), 1 << 33, 3, 777)]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def in_torch(x: torch.Tensor, rule: Rule, direction: str, **options) -> CastResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulation, "reason", lambda: "not wanted")
        patch.setattr(emulation, "load_kernels", lambda: pytest.fail("C is called"))
        return emulated.quantize(x, rule, direction, **options)


def assert_same(a: QuantizedSide | None, b: QuantizedSide | None) -> None:
    if a is None or b is None:
        assert a is b
        return
    assert a.shape == b.shape and a.codes.shape == b.codes.shape and a.codes.dtype == b.codes.dtype
    assert torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    assert torch.equal(a.scale_inv.view(torch.uint8), b.scale_inv.view(torch.uint8))
    assert torch.equal(a.tensor_amax, b.tensor_amax)
    assert all(getattr(a, name) == getattr(b, name) for name in FACTS)


def assert_all_same(a: CastResult, b: CastResult) -> None:
    for one, other in zip(a.tensor.sides, b.tensor.sides, strict=True):
        assert_same(one, other)
    assert torch.equal(a.amax, b.amax) and a.nonfinite == b.nonfinite


@pytest.mark.parametrize("what", ["normal", "wide", "bits", "special", "zeros", "tiny"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(RULES))
def test_bytes_are_the_specification_s(name: str, dtype: torch.dtype, what: str):
    rule = RULES[name]
    for shape in SHAPES:
        x = matrix(shape, dtype, what)
        for direction in ("rowwise", "columnwise", "both"):
            for region in REGIONS if rule.stochastic else [None]:
                assert in_c.takes(x)
                done = emulated.quantize(x, rule, direction, region=region)
                assert_all_same(done, in_torch(x, rule, direction, region=region))


@pytest.mark.parametrize("name", list(RULES))
def test_shards_whose_amaxes_are_reduced(name: str):
    """To those of another rank: larger, infinite, or its own."""
    x, rule = matrix((48, 80), torch.bfloat16, "normal"), RULES[name]
    for factor in (1.0, 37.0, torch.inf):
        options = {"reduce_amax": lambda amaxes, by=factor: amaxes.mul_(by), "region": REGIONS[1]}
        if not rule.stochastic:
            del options["region"]
        done = emulated.quantize(x, rule, "both", **options)
        assert_all_same(done, in_torch(x, rule, "both", **options))
        assert float(done.amax) == float(x.abs().max())


def test_amax_and_count_are_recorded():
    amax, nonfinite = torch.zeros(2)
    running = RunningAmax(amax, amax.view(torch.int32), nonfinite)
    x = torch.ones(32, 64)
    emulated.quantize(x * 3, RULES["rows"], "both", running=running)
    assert (float(amax), float(nonfinite)) == (3, 0)
    x[0, 3], x[5, 9] = torch.nan, -torch.inf
    emulated.quantize(x, RULES["squares"], "both", running=running)
    assert (float(amax), float(nonfinite)) == (torch.inf, 2)


@pytest.mark.parametrize("name", list(RULES))
def test_threads_and_their_modes_do_not_matter(name: str):
    """Helpers of a thread that flushes subnormal numbers flush too, until the kernels see to it."""
    x = matrix((520, 512), torch.float32, "tiny")
    region = REGIONS[0] if RULES[name].stochastic else None
    with threads(1):
        alone = emulated.quantize(x, RULES[name], "both", region=region)
    assert torch.set_flush_denormal(True), "this processor cannot flush subnormal numbers"
    try:
        with threads(3):
            together = emulated.quantize(x, RULES[name], "both", region=region)
    finally:
        torch.set_flush_denormal(False)
    assert_all_same(alone, together)


def test_views_are_read_as_they_lie():
    """At an odd address of a larger tensor, transposed, or with gaps."""
    whole = matrix((65, 131), torch.bfloat16, "wide")
    for x in (whole.view(-1)[1 : 1 + 64 * 128].view(64, 128), whole.t(), whole[::2, ::3]):
        done = emulated.quantize(x, RULES["rows"], "both")
        assert_all_same(
            done, emulated.quantize(x.clone(memory_format=torch.contiguous_format), RULES["rows"], "both")
        )


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (64, 512)])
@pytest.mark.parametrize("height", [1, 16])
def test_each_code_under_each_scale(shape: tuple[int, int], height: int):
    generator = torch.Generator().manual_seed(1)
    rows, cols = shape
    for first in range(0, 127, 7):
        codes = torch.randint(256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
        blocks = -(-rows // height), cols // 16
        scales = torch.randint(first, min(first + 7, 127), blocks, generator=generator, dtype=torch.uint8)
        packed, scales = codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn)
        values = in_c.decode(packed, scales, height)
        granularity = RULES["squares" if height == 16 else "rows"].granularity
        wanted = nvfp4.values(packed) * expand_scale(scales.float(), granularity, shape)
        assert torch.equal(values.float(), wanted) and torch.equal(values.signbit(), wanted.signbit())


@pytest.fixture(scope="module")
def sides() -> list[tuple[QuantizedSide, QuantizedSide]]:
    """Operands of fprop, dgrad and wgrad."""
    shapes = {"input": (130, 200), "weight": (70, 200), "grad_output": (130, 70)}
    x, w, dy = (
        emulated.quantize(
            matrix(shape, torch.bfloat16, "normal"), RULES[rule], "both", region=REGIONS[0]
        ).tensor
        for shape, rule in zip(shapes.values(), ("rows", "squares", "stochastic"), strict=True)
    )
    return [(x.rowwise, w.rowwise), (dy.rowwise, w.columnwise), (dy.columnwise, x.columnwise)]


@pytest.mark.skipif(emulation.inner_loop() is None, reason="no product in C")
def test_products_are_made_in_one_call(sides: list[tuple[QuantizedSide, QuantizedSide]]):
    """Factor, bias, rounding and addition in C give the bits of torch's operations on C's sums."""
    for a, b in sides:
        product = fp4.gemm(a, b, torch.float32, None, False)
        bias, into = torch.randn(len(b.codes)), torch.randn(product.shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fp4, "gemm", lambda *_: pytest.fail("a second way"))
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                assert torch.equal(emulated.gemm(a, b, out_dtype=dtype), product.to(dtype))
                made = emulated.gemm(a, b, out_dtype=dtype, bias=bias)
                assert torch.equal(made, (product + bias).to(dtype))
            added = into.clone()
            assert emulated.accumulate(a, b, added) and torch.equal(added, into + product)
    outs = [torch.empty(len(a.codes), len(b.codes)) for a, b in sides]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated, "gemm_in_turn", lambda *args, **_: args[1] and pytest.fail("one by one"))
        emulated.grouped_gemm(*zip(*sides, strict=True), outs)
    for (a, b), out in zip(sides, outs, strict=True):
        assert torch.equal(out, fp4.gemm(a, b, torch.float32, None, False))


def test_a_factor_beyond_the_range_of_products_in_c(sides: list[tuple[QuantizedSide, QuantizedSide]]):
    a, b = sides[0]
    values = emulated.gemm(a, b)
    for power in (-90, 110):
        scaled = replace(a, tensor_amax=a.tensor_amax * 2.0**power)
        assert torch.equal(emulated.gemm(scaled, b), values * 2.0**power)
    assert not emulated.gemm(replace(a, tensor_amax=torch.tensor(0.0)), b).any()


@pytest.mark.skipif(emulation.inner_loop() != emulation.AVX512, reason="no AVX512-BF16")
@pytest.mark.parametrize("n, k", [(1, 2000), (16, 1040), (70, 272), (5, 8192), (128, 128), (333, 600)])
def test_few_rows_have_the_bits_of_many(n: int, k: int, monkeypatch: pytest.MonkeyPatch):
    w = emulated.quantize(matrix((n, k), torch.bfloat16, "wide"), RULES["squares"], "rowwise").tensor.rowwise
    x = matrix((16, k), torch.bfloat16, "wide")
    for rows in range(1, 17):
        a = emulated.quantize(x[:rows], RULES["rows"], "rowwise").tensor.rowwise
        bias = torch.randn(n)
        for dtype in (torch.float32, torch.bfloat16):
            assert fp4.has_few_rows(a, w, dtype) == (n * nvfp4.padded_cols(k) >= emulation.MIN_PRODUCT)
            if not fp4.has_few_rows(a, w, dtype):
                continue
            with threads(2):
                done = emulated.gemm(a, w, out_dtype=dtype, bias=bias)
            with monkeypatch.context() as patch:
                patch.setattr(in_c, "MOST", 0)
                assert torch.equal(done, emulated.gemm(a, w, out_dtype=dtype, bias=bias))


@pytest.mark.skipif(not set(emulation.inner_loops()) - {emulation.FLOAT32}, reason="no product of codes")
@pytest.mark.parametrize("m, n, k", [(1, 1100, 48), (600, 40, 2064), (1030, 520, 16), (64, 700, 4112)])
@pytest.mark.parametrize("name", ["rows", "squares"])
def test_products_of_codes_have_the_bits_of_decoded_values(name: str, m: int, n: int, k: int):
    a, b = (
        emulated.quantize(matrix((rows, k), torch.bfloat16, "wide"), RULES[name], "rowwise").tensor.rowwise
        for rows in (m, n)
    )
    codes = [Operand(s.codes, fp4_scale=s.scale_inv, fp4_rows=s.granularity.rows) for s in (a, b)]
    values = [Operand(in_c.decode(s.codes, s.scale_inv, s.granularity.rows)) for s in (a, b)]
    for loop in set(emulation.inner_loops()) - {emulation.FLOAT32}:
        wanted = emulation.multiply(*values, torch.float32, loop=loop)
        for left, right in (codes, (codes[0], values[1]), (values[0], codes[1])):
            assert torch.equal(emulation.multiply(left, right, torch.float32, loop=loop), wanted)

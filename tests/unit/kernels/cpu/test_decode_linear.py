"""A linear with few tokens in one call: the bytes of quantising, decoding and multiplying one after the other."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.kernels.cpu import decode_linear, skinny_gemm
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Rule
from megatron_fp8.tensor import QuantizedSide

N, K = 160, 300
RULES = {
    "tensor": (Rule(E4M3, TENSOR), Rule(E4M3, TENSOR)),
    "margin": (Rule(E4M3, TENSOR, "pow2", margin=2, epsilon=2.0), Rule(E4M3, TENSOR)),
    "row": (Rule(E4M3, ROW), Rule(E4M3, ROW)),
    "e5m2": (Rule(E5M2, ROW), Rule(E4M3, TENSOR)),
    "block": (Rule(E4M3, BLOCK_1X128, "pow2"), Rule(E4M3, BLOCK_128X128, "pow2")),
    "mx": (Rule(E4M3, BLOCK_1X32, "e8m0"), Rule(E4M3, BLOCK_1X32, "e8m0")),
}


def tokens(rows: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)) * 3
    if kind == "special":
        x[0, 5], x[-1, 40], x[0, 41] = torch.nan, torch.inf, -torch.inf
    if kind == "uneven":
        x[:, 32:64] = 0
        x *= torch.logspace(-9, 9, K)
    if kind == "zeros":
        x *= 0
    return x.to(dtype)


def weight(rule: Rule) -> QuantizedSide:
    w = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    w[3, 64:96] = 0
    side = emulated.quantize(w, rule, "rowwise").tensor.rowwise
    assert side is not None
    return side


def in_steps(
    x: torch.Tensor, rule: Rule, scale: torch.Tensor | None, b: QuantizedSide, bias: torch.Tensor | None
) -> torch.Tensor:
    side = emulated.quantize(x, rule, "rowwise", scale=scale).tensor.rowwise
    assert side is not None
    return emulated.gemm(side, b, out_dtype=x.dtype, bias=bias)


@pytest.fixture(autouse=True)
def here():
    if not skinny_gemm.inner_loops():
        pytest.skip("this processor multiplies few rows as it does many")


@pytest.mark.parametrize("kind", ["plain", "special", "uneven", "zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("name", RULES)
def test_bytes_are_those_of_the_steps(name, dtype, kind):
    rule, of_weight = RULES[name]
    b = weight(of_weight)
    for rows, bias in ((1, None), (5, torch.linspace(-3, 3, N).to(dtype)), (16, None)):
        x = tokens(rows, dtype, kind)
        found = emulated.quantize_and_multiply(x, rule, None, b, bias)
        expected = in_steps(x, rule, None, b, bias)
        if name == "mx" and kind == "special":  # Inf's scale, 2^127, is beyond bfloat16's sums
            assert found is None
        else:
            assert found is not None
            assert_same_bytes(found, expected, f"{rows} rows")


@pytest.mark.parametrize("scale", [0.37, 4.0, 2e4])
@pytest.mark.parametrize("name", ["tensor", "margin"])
def test_a_scale_that_was_there_before(name, scale):
    """What it makes too large saturates."""
    rule, of_weight = RULES[name]
    given, b, x = torch.tensor(scale), weight(of_weight), tokens(3, torch.bfloat16, "special")
    found = emulated.quantize_and_multiply(x, rule, given, b, None)
    assert found is not None
    assert_same_bytes(found, in_steps(x, rule, given, b, None))


def test_what_it_leaves_to_the_steps():
    """Many rows, other dtypes and layouts, scales that are no powers of two along the contraction, scales beyond
    bfloat16."""
    rule, b = RULES["tensor"][0], weight(RULES["tensor"][1])
    x = tokens(4, torch.bfloat16, "plain")
    done = emulated.quantize_and_multiply
    assert done(x, rule, None, b, None) is not None
    assert done(tokens(17, torch.bfloat16, "plain"), rule, None, b, None) is None
    assert done(x.half(), rule, None, b, None) is None
    assert done(x.t().contiguous().t(), rule, None, b, None) is None
    assert done(x, Rule(E4M3, BLOCK_1X128), None, b, None) is None
    assert done(x, Rule(E4M3, BLOCK_128X128, "pow2"), None, b, None) is None
    assert done(x, Rule(E4M3, TENSOR, stochastic=True), None, b, None) is None
    assert done(x[:, :-1].contiguous(), rule, None, b, None) is None
    assert done(x, rule, None, b, torch.ones(1)) is None
    assert done(x, rule, torch.tensor(1e35), b, None) is None
    assert done(x, rule, torch.tensor(1e-30), b, None) is None
    mx = RULES["mx"]
    small = x * 1e-34  # its blocks of numbers, not of zeros, have scales that bfloat16 flushes
    assert done(small, mx[0], None, weight(mx[1]), None) is None


def test_addresses_are_of_tensors_that_are_as_large_as_is_said():
    side = weight(RULES["row"][1])
    short = decode_linear.Weight(side.codes, side.scale_inv[1:], None, True, 1.0, 1.0)
    with pytest.raises(AssertionError, match="160 contiguous elements"):
        decode_linear.multiply(
            tokens(1, torch.bfloat16, "plain"), RULES["row"][0], None, short, None, (0.0, 9.0)
        )

"""Products and casts of what lies alike: to the bit what is decided anew for each."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels.cpu import emulation, matrix_quantize
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_128X128, ROW, TENSOR, Rule

CUTS = {
    "tensor": (Rule(E4M3, TENSOR), [(0, 0)]),
    "rows and columns": (Rule(E5M2, ROW, "pow2"), [(1, 0), (0, 1)]),
    "squares": (Rule(E4M3, BLOCK_128X128, "pow2"), [(128, 128)]),
    "mx": (Rule(E4M3, BLOCK_1X32, "e8m0"), [(1, 32), (32, 1)]),
}


@pytest.fixture(autouse=True)
def here():
    if emulation.reason() is not None:
        pytest.skip(emulation.reason())


def matrix(seed: int, rows: int = 150, cols: int = 96) -> torch.Tensor:
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 2.0**seed
    if seed == 2:
        x[3, 5], x[7, 1] = torch.nan, torch.inf
    return x.bfloat16()


@pytest.mark.parametrize(("name", "given"), [("tensor", True), *((name, False) for name in CUTS)])
def test_casts(name: str, given: bool) -> None:
    rule, cuts = CUTS[name]
    scale = torch.tensor(3.5) if given else None
    one, other = (torch.zeros(()) for _ in range(2))
    cast = matrix_quantize.Repeated(matrix_quantize.Wanted(matrix(0), rule, cuts, one, scale))
    for seed in (1, 2, 3):
        found, special = cast(matrix(seed))
        (expected,) = matrix_quantize.quantize(
            [matrix_quantize.Wanted(matrix(seed), rule, cuts, other, scale)]
        )
        assert special == expected.special == (2 if seed == 2 else 0)
        for side, wanted in zip(found, expected.sides, strict=True):
            assert_same_bytes(side.codes, wanted.codes)
            assert_same_bytes(side.scale_inv, wanted.scale_inv)
        assert_same_bytes(one, other)


def test_casts_keep_what_they_gave() -> None:
    """A second call writes into memory of its own."""
    rule, cuts = CUTS["mx"]
    cast = matrix_quantize.Repeated(matrix_quantize.Wanted(matrix(0), rule, cuts))
    first, _ = cast(matrix(1))
    before = [(side.codes.clone(), side.scale_inv.clone()) for side in first]
    cast(matrix(4))
    for side, (codes, scale_inv) in zip(first, before, strict=True):
        assert_same_bytes(side.codes, codes)
        assert_same_bytes(side.scale_inv, scale_inv)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products(dtype: torch.dtype) -> None:
    if emulation.inner_loop() is None:
        pytest.skip("this processor has no such product")

    def operands(seed: int, large: float = 1.0) -> list[emulation.Operand]:
        rule, cuts = CUTS["mx"]
        made = []
        for x in (matrix(seed) * large, matrix(seed + 1, 170)):
            (one,) = matrix_quantize.quantize([matrix_quantize.Wanted(x, rule, cuts[:1])])
            made.append(emulation.Operand(*one.sides[0], (1, 32), True))
        return made

    product = emulation.Repeated(*operands(3), dtype)
    bias = torch.randn(170, generator=torch.Generator().manual_seed(9))
    for seed in (4, 6):
        a, b = operands(seed)
        given = a.values, a.scale, b.values, b.scale
        for extra in (None, bias):
            expected = emulation.multiply(a, b, dtype, extra)
            assert expected is not None
            assert_same_bytes(product(given, extra, None), expected)
        if dtype == torch.float32:
            sums = [torch.full((150, 170), 2.5) for _ in range(2)]
            assert product(given, None, sums[0]) is sums[0]
            emulation.multiply(a, b, dtype, into=sums[1])
            assert_same_bytes(*sums)
    a, b = operands(3, 2.0**115)
    assert emulation.multiply(a, b, dtype) is None
    assert product((a.values, a.scale, b.values, b.scale), None, None) is None, "beyond bfloat16's range"

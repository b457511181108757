"""Scales that stay outside a product, E8M0 too, as custom rules may have them; and operands without rows."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.backends import emulated
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.rule import BLOCK_1X32, ROW, TENSOR, Granularity, Rule


@pytest.mark.parametrize("tokens", [1, 16, 40])
@pytest.mark.parametrize("left", [TENSOR, ROW, BLOCK_1X32])
@pytest.mark.parametrize("right", [TENSOR, ROW])
def test_products_of_few_rows_take_them_too(right: Granularity, left: Granularity, tokens: int) -> None:
    """They raised an AssertionError for up to 16 tokens."""
    generator = torch.Generator().manual_seed(tokens)
    x, w = (
        emulated.quantize(
            torch.randn(rows, 256, generator=generator), Rule(E4M3, granularity, "e8m0"), "rowwise"
        ).tensor.rowwise
        for rows, granularity in ((tokens, left), (128, right))
    )
    assert x is not None and w is not None
    expected = emulated.gemm(x, w, out_dtype=torch.float64, exact=True)
    torch.testing.assert_close(emulated.gemm(x, w).to(torch.float64), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("granularity", [TENSOR, ROW])
def test_weights_without_rows_give_results_without_columns(granularity: Granularity) -> None:
    x, w = (
        emulated.quantize(torch.ones(rows, 2048), Rule(E4M3, granularity), "rowwise").tensor.rowwise
        for rows in (16, 0)
    )
    assert x is not None and w is not None
    assert emulated.gemm(x, w).shape == (16, 0)

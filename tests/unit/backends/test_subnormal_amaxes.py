"""Matrices whose largest number is subnormal, in a thread that flushes such numbers to zero."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.backends import emulated
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.rule import ROW, TENSOR, Granularity, Rule, ScaleKind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize("granularity", [TENSOR, ROW])
def test_flushing_changes_no_code_and_no_scale(
    granularity: Granularity, scale: ScaleKind, dtype: torch.dtype
) -> None:
    """Specification, section Cast: no flush to zero anywhere."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(1e-39)
    x = x.to(torch.float32).to(dtype)
    rule = Rule(E4M3, granularity, scale)
    expected = emulated.quantize(x, rule, "rowwise")
    torch.set_flush_denormal(True)
    try:
        made = emulated.quantize(x, rule, "rowwise")
    finally:
        torch.set_flush_denormal(False)
    assert made.tensor.rowwise is not None and expected.tensor.rowwise is not None
    for one, other in (
        (made.amax[None], expected.amax[None]),
        (made.tensor.rowwise.scale_inv.view(-1), expected.tensor.rowwise.scale_inv.view(-1)),
        (made.tensor.rowwise.codes, expected.tensor.rowwise.codes),
    ):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert bool(expected.amax > 0)

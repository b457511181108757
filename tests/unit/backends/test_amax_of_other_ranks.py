"""An Inf on one rank of a sharded matrix: every rank's scale is 1, and finite numbers of the others saturate."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megatron_fp8.backends import emulated, reference
from megatron_fp8.backends.base import CastRequest, CastResult
from megatron_fp8.numerics.formats import E4M3, E5M2, FloatFormat
from megatron_fp8.numerics.rule import ROW, TENSOR, Direction, Granularity, Rule, ScaleKind


def by_emulated(request: CastRequest) -> CastResult:
    return emulated.quantize_each([request])[0]


@pytest.mark.parametrize("quantize", [by_emulated, reference.quantize])
@pytest.mark.parametrize("rows", [4, 256])
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
@pytest.mark.parametrize("scale", ["fp32", "pow2"])
@pytest.mark.parametrize(
    ("granularity", "direction"), [(TENSOR, "rowwise"), (ROW, "columnwise"), (ROW, "both")]
)
def test_an_inf_elsewhere_saturates_what_is_finite_here(
    granularity: Granularity,
    direction: Direction,
    scale: ScaleKind,
    fmt: FloatFormat,
    rows: int,
    quantize: Callable[[CastRequest], CastResult],
) -> None:
    """Nothing wraps: specification, section Cast."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).mul(fmt.max).to(torch.bfloat16)
    rule = Rule(fmt, granularity, scale)
    tensor = quantize(CastRequest(x, rule, direction, reduce_amax=lambda amax: amax.fill_(math.inf))).tensor
    codes = tensor.rowwise.codes if direction == "rowwise" else tensor.columnwise.codes.t()
    expected = x.to(torch.float32).clamp(-fmt.max, fmt.max).to(fmt.dtype)
    assert torch.equal(codes.contiguous().view(torch.uint8), expected.view(torch.uint8))

"""Effects of quantisation on a matrix: underflow, saturation, error, scales.

``measure_codes`` uses torch operations and runs on any device. On CPUs with a compiler tensor_stats.py uses
kernels/cpu/stats.py instead.
"""

from __future__ import annotations

import math

import torch

from ..kernels.cast_dispatch import decode
from ..kernels.cpu.stats import Side
from ..numerics.cast import chunks
from ..numerics.rule import Granularity
from ..numerics.subnormals import keeping_subnormals
from ..tensor import QuantizedSide, scale_blocks_

_BEYOND = 1 + 2.0**-21
"""Scale and inverse are rounded, so the element with the amax may exceed the largest code by this factor."""


def side_of(quantized: QuantizedSide, shape: torch.Size, *, columnwise: bool) -> Side:
    """One side of a quantised matrix of this shape, in the matrix's own orientation.

    Args:
        columnwise: the side's codes are [cols, rows].

    Raises:
        ValueError: the codes have another shape.
    """
    codes, scale, granularity = quantized.codes, quantized.float_scale_inv(), quantized.granularity
    block = (granularity.rows, granularity.cols)
    if columnwise:
        codes, scale, block = codes.t(), scale.t() if scale.ndim == 2 else scale, block[::-1]
    if codes.shape != shape:
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} were not made of values of shape {tuple(shape)}"
        )
    return Side(codes.contiguous(), scale.contiguous(), block)


@keeping_subnormals
def measure_codes(x: torch.Tensor, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantisation statistics of x [rows, cols] and one side of its codes. Ignores NaN and Inf in x.

    Returns:
        float64 [3]: sum of squared errors, number of underflows, number of overflows. And float64 [2]: the
        largest scale_inv and the negated smallest (-Inf if there is none).
    """
    sums = torch.zeros(3, dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return sums, torch.full((2,), -math.inf, dtype=torch.float64, device=x.device)
    codes, scale, granularity = side.made, side.scale, Granularity(*side.block)
    smallest, largest = scale.aminmax()
    unit = granularity.rows or 1  # chunks hold whole blocks
    for part in chunks(-(-x.shape[0] // unit), x.numel(), x.device):
        rows = slice(unit * part.start, unit * part.stop)
        of_part = (scale[part] if granularity.rows else scale).to(torch.float64)
        sums += _chunk(x[rows], codes[rows], of_part, granularity, torch.finfo(codes.dtype).max)
    return sums, torch.stack([largest, -smallest]).to(torch.float64)


def _chunk(
    x: torch.Tensor, made: torch.Tensor, scale: torch.Tensor, granularity: Granularity, fp8_max: float
) -> torch.Tensor:
    """The three sums over a chunk of rows; scale is float64."""
    values = x.to(torch.float64)
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0)
    meant = decode(made, torch.float32).to(torch.float64)
    vanished = ((meant == 0) & (values != 0)).sum()
    top = _scaled(torch.full_like(values, fp8_max * _BEYOND), scale, granularity)
    lost = torch.where(finite, values - _scaled(meant, scale, granularity), 0.0)
    return torch.stack([lost.square().sum(), vanished, (values.abs() > top).sum()])


def _scaled(values: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """Multiplies values [rows, cols] in place by the scale of their block."""
    if granularity.rows == 0:  # one scale per column, or one for all
        return values.mul_(scale)
    return scale_blocks_(values, scale, granularity)

"""What quantising did to a matrix: values that vanished, values that saturated, the error, and the scales."""

from __future__ import annotations

import math

import torch

from ..kernels.codes import decode
from ..kernels.cpu import figures
from ..numerics.cast import chunks
from ..numerics.rule import Granularity
from ..numerics.subnormals import keeping_subnormals
from ..tensor import QuantizedSide, scale_blocks_

_BEYOND = 1 + 2.0**-21
"""A scale and its inverse are rounded, so the element that made the scale can lie beyond the largest code by this."""


@keeping_subnormals
def measure_codes(
    x: torch.Tensor, side: QuantizedSide, *, columnwise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Figures of x [rows, cols] and of one side of what was made of it; elements of x that are NaN or Inf are left out.

    Args:
        columnwise: the side holds codes [cols, rows].

    Returns:
        float64 [3]: the sum of squared errors, the number of underflows and of overflows; and float64 [2]: the largest
        scale_inv and the negative of the smallest (-Inf where there is none).

    Raises:
        ValueError: the codes are not of x's shape.
    """
    made, scale, granularity = side.codes, side.float_scale_inv(), side.granularity
    if columnwise:
        made, scale = made.t(), scale.t() if scale.ndim == 2 else scale
        granularity = Granularity(granularity.cols, granularity.rows)
    if made.shape != x.shape:
        raise ValueError(
            f"codes of shape {tuple(made.shape)} were not made of values of shape {tuple(x.shape)}"
        )
    if x.numel() == 0:
        nothing = torch.full((2,), -math.inf, dtype=torch.float64, device=x.device)
        return torch.zeros(3, dtype=torch.float64, device=x.device), nothing
    smallest, largest = scale.aminmax()
    scales = torch.stack([largest, -smallest]).to(torch.float64)
    made = made.contiguous()
    if figures.usable(x) and figures.plain(made):
        found = figures.codes(x, made, scale, (granularity.rows, granularity.cols))
        return torch.tensor(found, dtype=torch.float64, device="cpu"), scales
    sums = torch.zeros(3, dtype=torch.float64, device=x.device)
    unit = granularity.rows or 1  # chunks hold whole blocks
    for part in chunks(-(-x.shape[0] // unit), x.numel(), x.device):
        rows = slice(unit * part.start, unit * part.stop)
        of_part = (scale[part] if granularity.rows else scale).to(torch.float64)
        sums += _chunk(x[rows], made[rows], of_part, granularity, side.fmt.max)
    return sums, scales


def _chunk(
    x: torch.Tensor, made: torch.Tensor, scale: torch.Tensor, granularity: Granularity, fp8_max: float
) -> torch.Tensor:
    """The three sums of some rows; scale is float64."""
    values = x.to(torch.float64)
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0)
    meant = decode(made, torch.float32).to(torch.float64)
    vanished = ((meant == 0) & (values != 0)).sum()
    top = _scaled(torch.full_like(values, fp8_max * _BEYOND), scale, granularity)
    lost = torch.where(finite, values - _scaled(meant, scale, granularity), 0.0)
    return torch.stack([lost.square().sum(), vanished, (values.abs() > top).sum()])


def _scaled(values: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """values [rows, cols], in place, times the scale of their block."""
    if granularity.rows == 0:  # one scale for each column, or for all
        return values.mul_(scale)
    return scale_blocks_(values, scale, granularity)

"""What quantising did to a matrix: values that vanished, values that saturated, the error, and the scales."""

from __future__ import annotations

import math

import torch

from ..kernels.codes import decode
from ..numerics.cast import chunks
from ..numerics.subnormals import keeping_subnormals
from ..recipe import Granularity
from ..tensor import QuantizedSide, scale_blocks_

_BEYOND = 1 + 2.0**-21
"""A scale and its inverse are rounded, so the element that made the scale can lie beyond the largest code by this."""


@keeping_subnormals
def measure_codes(x: torch.Tensor, side: QuantizedSide, *, columnwise: bool) -> tuple[torch.Tensor, ...]:
    """Figures of x [rows, cols] and of one side of what was made of it; elements of x that are NaN or Inf are left out.

    Args:
        columnwise: the side holds codes [cols, rows].

    Returns:
        float64 [] each: the sum of squared errors, the number of underflows and of overflows, the largest scale_inv, and
        the negative of the smallest (-Inf where there is none).

    Raises:
        ValueError: the codes are not of x's shape.
    """
    codes, scale, granularity = side.codes, side.float_scale_inv(), side.granularity
    if columnwise:
        codes, scale = codes.t(), scale.t() if scale.ndim == 2 else scale
        granularity = Granularity(granularity.cols, granularity.rows)
    if codes.shape != x.shape:
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} were not made of values of shape {tuple(x.shape)}"
        )
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    if x.numel() == 0:
        return zero, zero, zero, zero - math.inf, zero - math.inf
    error, underflows, overflows = zero, zero.clone(), zero.clone()
    unit = granularity.rows or 1  # chunks hold whole blocks
    for part in chunks(-(-x.shape[0] // unit), x.numel(), x.device):
        rows = slice(unit * part.start, unit * part.stop)
        values, stored = x[rows].to(torch.float64), codes[rows]
        of_part = scale[part] if granularity.rows else scale
        meant = _scaled(
            decode(stored, torch.float32).to(torch.float64), of_part.to(torch.float64), granularity
        )
        finite = values.isfinite()
        magnitude = stored.contiguous().view(torch.uint8) & 0x7F
        underflows += ((magnitude == 0) & (values != 0) & finite).sum()
        largest = decode(stored, torch.float32).abs() == side.fmt.max
        overflows += (largest & finite & (values.abs() > meant.abs() * _BEYOND)).sum()
        lost = torch.where(finite, values - meant, 0.0).reshape(-1)
        error = error + torch.dot(lost, lost)
    scales = scale.to(torch.float64)
    return error, underflows, overflows, scales.amax(), -scales.amin()


def _scaled(values: torch.Tensor, scale: torch.Tensor, granularity: Granularity) -> torch.Tensor:
    """values [rows, cols] times the scale of their block, in place where it can be."""
    if granularity.rows == 0:  # one scale for each column, or for all
        return values.mul_(scale)
    return scale_blocks_(values, scale, granularity)

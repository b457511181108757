"""Sums and extremes of a matrix and of its codes with torch operations.

On CPUs with a compiler tensor_stats.py uses kernels/cpu/stats.py instead; the sums agree to the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..kernels.cast_dispatch import decode
from ..kernels.cpu.stats import Side
from ..numerics import host_sync, nvfp4
from ..numerics.cast import chunks
from ..numerics.formats import E4M3
from ..numerics.rule import Granularity
from ..numerics.scaling import blocked
from ..numerics.subnormals import keeping_subnormals
from ..tensor import QuantizedSide, scale_blocks_
from .stat_registry import Blocks

_BEYOND = 1 + 2.0**-21
"""Scale and inverse are rounded, so the element with the amax may exceed the largest code by this factor."""


@keeping_subnormals
def measure_values(x: torch.Tensor, blocks: Sequence[Blocks]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and extremes of the finite elements of a contiguous matrix x [rows, cols].

    Returns:
        float64 [7]: number of elements, number of finite ones, sums of x, |x|, x^2, x^3, x^4. And float64 [3
        + len(blocks)]: the maxima of x, of -x, and of -|x| over x != 0; then for each of blocks the largest
        ratio of a block's largest to its smallest non-zero magnitude (1 for zeros). The maximum of nothing is
        -Inf.
    """
    flat = x.reshape(-1)
    sums = torch.zeros(7, dtype=torch.float64, device=x.device)
    extremes = torch.full((3,), -math.inf, dtype=torch.float64, device=x.device)
    for part in chunks(flat.numel(), flat.numel(), x.device):
        found = _values_of_chunk(flat[part])
        sums += found[0]
        extremes = torch.maximum(extremes, found[1])
    largest = [torch.stack([_ratio(x, tile) for tile in tiles(cut)]).amax(0, keepdim=True) for cut in blocks]
    return sums, torch.cat([extremes, *largest])


def tiles(cut: Blocks) -> list[tuple[int, int]]:
    """The blocks as (rows, columns)."""
    height = cut.size if cut.dims == 2 else 1
    turned = cut.both_orientations and cut.dims == 1
    return [(height, cut.size), (cut.size, height)] if turned else [(height, cut.size)]


def _values_of_chunk(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The seven sums and three extremes of a chunk of elements."""
    x = part.to(torch.float64)
    finite = x.isfinite()
    count = finite.sum(dtype=torch.float64)
    if host_sync.reading_syncs(x.device) or float(count) != x.numel():
        lowest, highest = (torch.where(finite, x, math.inf).amin(), torch.where(finite, x, -math.inf).amax())
        x = torch.where(finite, x, 0.0)
    else:
        lowest, highest = x.aminmax()
    square, magnitude = x * x, x.abs()
    smallest = torch.where(magnitude == 0, math.inf, magnitude).amin()
    total = torch.full_like(count, part.numel())
    powers = [torch.dot(square, power) for power in (x, square)]
    sums = [total, count, x.sum(), magnitude.sum(), square.sum(), *powers]
    return torch.stack(sums), torch.stack([highest, -lowest, -smallest])


def _ratio(x: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """The largest ratio of magnitudes within a block, float64 []."""
    if x.numel() == 0:
        return torch.full((), -math.inf, dtype=torch.float64, device=x.device)
    magnitude = x.abs().to(torch.float32)
    tiles = blocked(torch.where(magnitude.isfinite(), magnitude, 0.0), *tile)
    largest = tiles.amax((1, 3)).to(torch.float64)
    smallest = torch.where(tiles == 0, math.inf, tiles).amin((1, 3)).to(torch.float64)
    return torch.where(largest == 0, 1.0, largest / smallest).amax()


def side_of(quantized: QuantizedSide, shape: torch.Size, *, columnwise: bool) -> Side:
    """One side of a quantized matrix of this shape, in the matrix's own orientation.

    Args:
        columnwise: the side's codes are [cols, rows].

    Raises:
        ValueError: the codes have another shape.
    """
    codes, scale, granularity = quantized.codes, quantized.float_scale_inv(), quantized.granularity
    block = (granularity.rows, granularity.cols)
    if (of_tensor := quantized.tensor_scale_inv) is not None:
        # E4M3 has all of E2M1's numbers.
        numbers = nvfp4.values(codes)[:, : quantized.shape[1]]
        codes, scale = numbers.to(E4M3.dtype), scale * of_tensor
    if columnwise:
        codes, scale, block = codes.t(), scale.t() if scale.ndim == 2 else scale, block[::-1]
    if codes.shape != shape:
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} were not made of values of shape {tuple(shape)}"
        )
    return Side(codes.contiguous(), scale.contiguous(), block, quantized.fmt.max)


@keeping_subnormals
def measure_codes(x: torch.Tensor, side: Side) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantization statistics of x [rows, cols] and one side of its codes. Ignores NaN and Inf in x.

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
        sums += _quantization_of_chunk(x[rows], codes[rows], of_part, granularity, side.largest)
    return sums, torch.stack([largest, -smallest]).to(torch.float64)


def _quantization_of_chunk(
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

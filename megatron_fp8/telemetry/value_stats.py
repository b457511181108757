"""Sums and extremes of a matrix's values with torch operations, on any device.

On CPUs with a compiler tensor_stats.py uses kernels/cpu/stats.py instead; the sums agree to the last bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..numerics import host_sync
from ..numerics.cast import chunks
from ..numerics.scaling import blocked
from ..numerics.subnormals import keeping_subnormals
from .stat_registry import Blocks


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
        found = _chunk(flat[part])
        sums += found[0]
        extremes = torch.maximum(extremes, found[1])
    largest = [torch.stack([_ratio(x, tile) for tile in tiles(cut)]).amax(0, keepdim=True) for cut in blocks]
    return sums, torch.cat([extremes, *largest])


def tiles(cut: Blocks) -> list[tuple[int, int]]:
    """The blocks as (rows, columns)."""
    height = cut.size if cut.dims == 2 else 1
    turned = cut.both_orientations and cut.dims == 1
    return [(height, cut.size), (cut.size, height)] if turned else [(height, cut.size)]


def _chunk(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The seven sums and three extremes of a chunk of elements."""
    x = part.to(torch.float64)
    finite = x.isfinite()
    count = finite.sum(dtype=torch.float64)
    if host_sync.reading_syncs(x.device) or float(count) != x.numel():
        lowest, highest = (
            torch.where(finite, x, math.inf).amin(),
            torch.where(finite, x, -math.inf).amax(),
        )
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

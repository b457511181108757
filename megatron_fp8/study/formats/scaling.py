"""Quantises one tensor with outliers by every recipe.

The largest element sharing a scale determines it. One outlier moves the other elements of its tensor, row or
block down in the format's range; below the smallest normal value their relative error grows until they become
0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...quantizer import quantize
from ...recipe import RECIPES

ROWS, COLS, OUTLIERS = 256, 1024, 32
SIZES = (1, 1024, 16384, 65536, 262144)
"""Size of the outliers in standard deviations; 1: no outliers."""
NAMES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
"""Recipes with current scaling; for delayed scaling see delayed.py."""


@dataclass(frozen=True)
class Quantised:
    """Result of a recipe on the tensor.

    Attributes:
        recipe, rule: 'mxfp8', and its rule for the operand ('e4m3 1x32 e8m0').
        outlier: size of the outliers, in standard deviations.
        sqnr: signal-to-quantisation-noise ratio of all elements, in dB, dominated by the outliers.
        ordinary: the same for all other elements, which matters for training.
        flushed: share of those that became 0.
    """

    recipe: str
    rule: str
    outlier: int
    sqnr: float
    ordinary: float
    flushed: float


def with_outliers(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [ROWS, COLS] with standard deviation 1, bool mask of the OUTLIERS elements set to `size`)."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(ROWS, COLS, generator=generator, dtype=torch.float32, device="cpu")
    places = torch.randperm(ROWS * COLS, generator=generator, dtype=torch.int64, device="cpu")[:OUTLIERS]
    where = torch.zeros(ROWS * COLS, dtype=torch.bool, device="cpu")
    if size > 1:
        where[places] = True
        x.view(-1)[places] = torch.copysign(
            torch.tensor(size, dtype=torch.float32, device="cpu"), x.view(-1)[places]
        )
    return x, where.view(ROWS, COLS)


def sqnr(x: torch.Tensor, found: torch.Tensor) -> float:
    """Signal-to-quantisation-noise ratio in dB, computed in float64: Inf without error, NaN without elements."""
    signal = x.double().square().sum()
    return float(10 * (signal / (found.double() - x.double()).square().sum()).log10())


@cache
def by_recipe(seed: int = 0) -> tuple[Quantised, ...]:
    """Every recipe and operand with a distinct rule, at every size of outliers."""
    found = []
    for size in SIZES:
        x, outliers = with_outliers(size, seed)
        for name in NAMES:
            recipe = RECIPES[name]()
            seen = set()
            for role in ("input", "weight"):
                rule = str(recipe.rule(role))
                if rule in seen:
                    continue
                seen.add(rule)
                y = quantize(x, recipe, role).dequantize(torch.float32)
                found.append(
                    Quantised(
                        name,
                        rule,
                        size,
                        sqnr(x, y),
                        sqnr(x[~outliers], y[~outliers]),
                        float((y[~outliers] == 0).double().mean()),
                    )
                )
    return tuple(found)

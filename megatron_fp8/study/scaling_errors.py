"""Errors of scaling: outliers by every recipe, delayed scaling on changing magnitudes.

The largest element sharing a scale determines it. One outlier moves the other elements of its tensor, row or
block down in the format's range; below the smallest normal value their relative error grows until they become
0.

With delayed scaling an iteration's scale comes from the amaxes of earlier iterations. If the next tensor is
larger than all of them, its largest values saturate; if it is far smaller than a remembered one, it uses only
the low end of the format. A longer history remembers longer, a margin adds headroom; neither predicts a jump.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ..backends import emulated
from ..quantizer import Quantizer, quantize
from ..recipe import RECIPES, DelayedScaling, Float8CurrentScaling, Recipe
from ..state.fp8_state import Fp8State

ROWS, COLS, OUTLIERS = 256, 1024, 32
SIZES = (1, 1024, 16384, 65536, 262144)
"""Size of the outliers in standard deviations; 1: no outliers."""
NAMES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")
"""Recipes with current scaling; delayed scaling is simulated below."""


@dataclass(frozen=True)
class RecipeResult:
    """Result of a recipe on the tensor.

    Attributes:
        recipe, rule: 'mxfp8', and its rule for the operand ('e4m3 1x32 e8m0').
        outlier: size of the outliers, in standard deviations.
        sqnr_db: signal-to-quantization-noise ratio of all elements, dominated by the outliers.
        ordinary_sqnr_db: the same for all other elements, which matters for training.
        ordinary_flushed: share of those that became 0.
    """

    recipe: str
    rule: str
    outlier: int
    sqnr_db: float
    ordinary_sqnr_db: float
    ordinary_flushed: float


def outlier_tensor(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
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
    """Signal-to-quantization-noise ratio in dB, computed in float64: Inf without error, NaN without elements."""
    signal = x.double().square().sum()
    return float(10 * (signal / (found.double() - x.double()).square().sum()).log10())


@cache
def recipe_results(seed: int = 0) -> tuple[RecipeResult, ...]:
    """Every recipe and operand with a distinct rule, at every size of outliers."""
    found = []
    for size in SIZES:
        x, outliers = outlier_tensor(size, seed)
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
                    RecipeResult(
                        name,
                        rule,
                        size,
                        sqnr(x, y),
                        sqnr(x[~outliers], y[~outliers]),
                        float((y[~outliers] == 0).double().mean()),
                    )
                )
    return tuple(found)


ITERATIONS = 64
MAGNITUDES: dict[str, list[float]] = {
    "steady": [1.0] * ITERATIONS,
    "growing": [2.0 ** (i / 4) for i in range(ITERATIONS)],
    "spiky": [65536.0 if i in (20, 44) else 1.0 for i in range(ITERATIONS)],
}
"""Standard deviation of the tensor of each iteration: the same, doubled every 4 iterations, 65536 times as large
in two."""

SETTINGS: dict[str, Recipe] = {
    "tensorwise (no delay)": Float8CurrentScaling(),
    **{
        f"history {length}, margin {margin}": DelayedScaling(amax_history_len=length, margin=margin)
        for length, margin in ((1, 0), (16, 0), (1024, 0), (16, 1), (16, 3))
    },
}
_ELEMENTS = 4096


@dataclass(frozen=True)
class Step:
    """One iteration: scale, shares of elements that saturated or became 0, and SQNR in dB."""

    iteration: int
    magnitude: float
    scale: float
    saturated: float
    flushed: float
    sqnr: float


def simulate(recipe: Recipe, magnitudes: Sequence[float], seed: int = 0) -> tuple[Step, ...]:
    """Quantizes a normal tensor of each magnitude as a site's input, ending the iteration after each."""
    state = Fp8State(torch.device("cpu"))
    rule = recipe.rule("input")
    assert rule is not None
    slot = state.arena(None).add(recipe if isinstance(recipe, DelayedScaling) else None, rule.fmt)
    quantizer = Quantizer(rule, slot, emulated)
    generator = torch.Generator("cpu").manual_seed(seed)
    steps = []
    for iteration, magnitude in enumerate(magnitudes):
        x = torch.randn(1, _ELEMENTS, generator=generator, dtype=torch.float32, device="cpu") * magnitude
        side = quantizer(x, "rowwise", record=True).rowwise
        assert side is not None
        y = side.dequantize(torch.float32)
        scale_inv = side.scale_inv.view(-1)[0]
        # Values up to half a step above the largest one round to it; only larger ones count as saturated.
        limit = rule.fmt.max * (1 + 2.0 ** -(rule.fmt.mantissa_bits + 2)) * scale_inv
        steps.append(
            Step(
                iteration,
                magnitude,
                float(1 / scale_inv),
                float((x.abs() > limit).double().mean()),
                float((y == 0).double().mean()),
                sqnr(x, y),
            )
        )
        state.finish_iteration()
    return tuple(steps)


@cache
def all_simulations(seed: int = 0) -> Mapping[tuple[str, str], tuple[Step, ...]]:
    """(magnitudes, setting) -> steps, for every combination of both tables."""
    return {
        (kind, name): simulate(recipe, magnitudes, seed)
        for kind, magnitudes in MAGNITUDES.items()
        for name, recipe in SETTINGS.items()
    }

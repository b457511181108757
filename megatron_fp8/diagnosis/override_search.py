"""Greedy search for a small set of overrides that helps, then pruning."""

from __future__ import annotations

from dataclasses import dataclass, field

from .attribution import Attribution
from .measurements import Experiments, VariantMeasurement
from .variants import Part


@dataclass
class Remedy:
    """Parts to run in high precision, and what that recovers.

    Attributes:
        parts: in the order in which they were added.
        recovered: recovered share of the distance, relative to all outstanding parts in high precision; None
            if nothing stands out, or if that does not help.
        distance: with these overrides, of the gradient from high precision.
        complete: whether the requested share is recovered.
    """

    parts: list[Part] = field(default_factory=list)
    recovered: float | None = None
    distance: float | None = None
    complete: bool = True

    @property
    def overrides(self) -> dict[str, str]:
        """For Fp8Config and fp8_overrides."""
        return {part.key: "bf16" for part in self.parts}


def find_remedy(experiments: Experiments, found: Attribution, share: float) -> Remedy:
    """Overrides that recover ``share`` of what all outstanding parts in high precision would.

    The share refers to the distance and, if the loss rises beyond its spread, to the loss as well. For each
    site the GEMM or operand that explains it is overridden, unless whole sites recover clearly more. If the
    budget ends, the result so far is returned.
    """
    outstanding = [finding for finding in found.findings if finding.stands_out]
    sites = list(dict.fromkeys(finding.site for finding in outstanding))
    if not sites or experiments.left < 2:
        return Remedy(complete=not sites)
    experiments.expect(2 + 2 * len(sites))
    goal = _Goal(experiments, found, [Part(site) for site in sites], share)
    worst_of_site = {finding.site: finding.part for finding in reversed(outstanding)}
    narrow = _Goal(experiments, found, [worst_of_site[site] for site in sites], share)
    if narrow.gain >= _AS_GOOD * goal.gain:
        goal = narrow
    if goal.gain <= 0:
        return Remedy(complete=False)
    chosen: list[Part] = []
    current = found.planned
    for part in goal.parts:
        if goal.met(current) or experiments.left < 1:
            break
        trial = goal.measure([*chosen, part])
        if goal.distance(trial) < goal.distance(current) or goal.rise(trial) < goal.rise(current):
            chosen, current = [*chosen, part], trial
    for part in list(chosen):
        rest = [other for other in chosen if other != part]
        if not rest or experiments.left < 1:
            continue
        without = goal.measure(rest)
        if goal.met(without):
            chosen, current = rest, without
    return Remedy(chosen, goal.recovered(current), goal.distance(current), goal.met(current))


_AS_GOOD = 0.8
"""Parts replace their sites if they recover at least this share of what the sites do: good GEMMs of a site
contribute a little too."""


class _Goal:
    """Decides when overrides recover enough, relative to all parts in high precision."""

    def __init__(self, experiments: Experiments, found: Attribution, all_parts: list[Part], share: float):
        self._experiments, self._found, self._share = experiments, found, share
        self.parts, self._planned = all_parts, found.planned
        self._best = self.measure(all_parts)

    def measure(self, parts: list[Part]) -> VariantMeasurement:
        """The plan with these parts in high precision."""
        return self._experiments.measure(self._experiments.variants.without(parts))

    def distance(self, measured: VariantMeasurement) -> float:
        """Distance from high precision, at most 1; 2 if a value is not finite."""
        return measured.distances(self._found.counted).mean if measured.finite else 2.0

    def rise(self, measured: VariantMeasurement) -> float:
        """Loss increase over high precision, if the plan's exceeds its spread; else 0."""
        change = self._planned.loss_changes
        if not change.mean > change.spread and self._planned.finite:
            return 0.0
        return max(measured.loss_changes.mean, 0.0)

    @property
    def gain(self) -> float:
        """Reduction of the gradient's distance with all parts in high precision."""
        return self.distance(self._planned) - self.distance(self._best)

    def recovered(self, measured: VariantMeasurement) -> float:
        """The share of ``gain`` that this variant recovers."""
        return (self.distance(self._planned) - self.distance(measured)) / self.gain

    def met(self, measured: VariantMeasurement) -> bool:
        """Whether the requested share is recovered."""
        if not measured.finite:
            return False
        rise, best = self.rise(self._planned), self.rise(self._best)
        enough = rise <= best or self.rise(measured) <= best + (1 - self._share) * (rise - best)
        return self.recovered(measured) >= self._share and enough

"""Which site, GEMM or operand costs more in FP8 than it has to.

FP8 rounds, and its rounding alone moves every gradient by some per cent: that a site in FP8 differs from one in high
precision is no finding. So each is compared with itself at its best, where the same operands are rounded to as many
significant bits and nothing else happens: no underflow, no saturation, no scale. What goes beyond that is a fault of
scales, ranges or codes, and can be cured.

Rejected: to rank by the signal-to-noise ratio of casts. It does not say how the loss depends on a tensor (errors do not
add: arXiv 2307.05657), and misses a wrong product of perfect casts. Rejected: to call everything a finding that is beyond
the spread of differences and beyond BF16: every healthy site is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..plan.site_plan import SitePlan
from .experiments import Experiments, counted_parameters, mean_loss
from .measures import Measured, Paired
from .variants import Part


@dataclass(frozen=True)
class Limits:
    """When a part stands out.

    Attributes:
        ratio: its distance from high precision, over that of itself at its best (``beyond_rounding``).
        bf16: its distance, over what rounding everything to BF16 does.
        loss: its change of the loss, over the loss.
        refined: how many of the worst sites have their GEMMs and operands measured apart.
    """

    ratio: float = 1.6
    bf16: float = 3.0
    loss: float = 0.005
    refined: int = 3


@dataclass(frozen=True)
class Finding:
    """What a site, or one of its GEMMs or operands, costs in FP8, all else in high precision.

    Attributes:
        site, gemm, role: what is in FP8 alone: the site, or one GEMM (fprop, dgrad, wgrad) or one operand (input, weight,
            grad_output) of it, else None.
        loss_change, loss_spread: mean over batches, and what chance may add to it.
        gradient_error, cosine: of all parameters together, against the gradient in high precision.
        bias: the error of the mean over batches.
        distance, at_best: root mean square of the errors of all parameter tensors; at_best is the part rounded alone.
        excess: what the distance has beyond at_best (squares add).
        update_error: of the optimizer's update, None if that is not known.
        worst_parameter, worst_error: the parameter whose gradient errs most, and by how much.
        stands_out, why: whether it costs more than it has to, and by which figures.
    """

    site: str
    gemm: str | None
    role: str | None
    loss_change: float
    loss_spread: float
    gradient_error: float
    cosine: float
    bias: float
    distance: float
    at_best: float
    excess: float
    update_error: float | None
    worst_parameter: str
    worst_error: float
    stands_out: bool
    why: str

    @property
    def part(self) -> Part:
        """What it is about."""
        return Part(self.site, self.gemm, self.role)

    @property
    def key(self) -> str:
        """As an override names it."""
        return self.part.key

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass
class Attribution:
    """All that was measured.

    Attributes:
        planned, at_best, bf16: all sites so, against high precision.
        counted: the parameters whose gradients BF16 leaves worth something.
        findings: worst first.
        groups: the layer groups that were screened, with their excess; empty where all sites were measured.
        skipped: sites that the budget had no room for.
        sum_alone: the loss changes of all sites alone, summed; None where not all were measured.
    """

    planned: Measured
    at_best: Measured
    bf16: Measured
    counted: list[str]
    findings: list[Finding] = field(default_factory=list)
    groups: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    sum_alone: float | None = None

    @property
    def interaction(self) -> float | None:
        """The loss change of all sites at once, minus the sum of each alone."""
        return None if self.sum_alone is None else self.planned.loss_changes.mean - self.sum_alone


def attribute(experiments: Experiments, limits: Limits) -> Attribution:
    """Measure all at once, groups of layers if the sites are too many for the budget, sites, and parts of the worst."""
    variants, plans = experiments.variants, experiments.subject.plans
    experiments.expect(3 + 2 * len(plans) + 12)
    every = [Part(name) for name in plans]
    bf16 = experiments.measure(variants.bf16)
    judge = _Judge(experiments, limits, bf16)
    found = Attribution(
        experiments.measure(variants.planned),
        experiments.measure(variants.at_best("all", every)),
        bf16,
        judge.counted,
    )
    names = _screen(experiments, judge, found)
    sites = []
    for done, name in enumerate(names):
        if experiments.left < (2 + _RESERVE if done else 2):
            found.skipped += names[done:]
            break
        sites.append(judge.finding(Part(name)))
    if len(sites) == len(plans):
        found.sum_alone = sum(finding.loss_change for finding in sites)
    sites.sort(key=_rank)
    worst = [finding for finding in sites if finding.stands_out] or sites[:1]
    parts: dict[str, list[Finding]] = {}
    for finding in worst[: limits.refined]:
        pieces = finding.part.parts(plans[finding.site])
        if experiments.left < 2 * len(pieces):
            break
        experiments.expect(2 * len(pieces))
        parts[finding.site] = [judge.finding(part) for part in pieces]
    found.findings = _ordered(sites, parts, plans)
    return found


_RESERVE = 20
"""Variants that are kept for the parts of the worst site and for overrides."""


class _Judge:
    """Measures parts, and says whether they stand out."""

    def __init__(self, experiments: Experiments, limits: Limits, bf16: Measured):
        self._experiments, self._limits, self._bf16 = experiments, limits, bf16
        self.counted = counted_parameters(bf16)

    def finding(self, part: Part) -> Finding:
        """Of one part."""
        alone, best, excess = self.measure(part.key, [part])
        distance, at_best = alone.distances(self.counted).mean, best.distances(self.counted).mean
        why = self._why(alone, best)
        errors = alone.errors()
        counted = self.counted or list(errors)
        worst = max(counted, key=lambda name: errors[name])
        return Finding(
            part.site,
            part.gemm,
            part.role,
            loss_change=alone.loss_changes.mean,
            loss_spread=alone.loss_changes.spread,
            gradient_error=alone.gradient_errors.mean,
            cosine=alone.cosine,
            bias=alone.bias,
            distance=distance,
            at_best=at_best,
            excess=excess,
            update_error=alone.update_error,
            worst_parameter=worst,
            worst_error=errors[worst],
            stands_out=bool(why),
            why=why,
        )

    def measure(self, name: str, parts: Iterable[Part]) -> tuple[Measured, Measured, float]:
        """These parts alone, at their best, and the distance beyond that."""
        variants, parts = self._experiments.variants, list(parts)
        alone = self._experiments.measure(variants.alone(name, parts))
        best = self._experiments.measure(variants.at_best(name, parts))
        squares = alone.distances(self.counted).mean ** 2 - best.distances(self.counted).mean ** 2
        return alone, best, math.sqrt(max(squares, 0.0))

    def _why(self, alone: Measured, best: Measured) -> str:
        """By which figures it stands out; '' if it does not."""
        limits, counted = self._limits, self.counted
        if not alone.finite:
            return "not finite in FP8, finite in high precision"
        distances, rounded = alone.distances(counted), best.distances(counted)
        floor = limits.bf16 * self._bf16.distances(counted).mean
        if beyond_rounding(distances, rounded, limits.ratio) and distances.mean > floor:
            times = distances.mean / rounded.mean if rounded.mean else math.inf
            return f"gradient error {times:.3g} times that of rounding alone"
        change, least = alone.loss_changes, abs(mean_loss(self._experiments.losses)) * limits.loss
        floors = (
            change.spread,
            least,
            limits.bf16 * abs(self._bf16.loss_changes.mean),
            limits.ratio * abs(best.loss_changes.mean),
        )
        if change.mean > max(floors):
            return f"loss {change.mean:+.3g}, by rounding alone {best.loss_changes.mean:+.3g}"
        return ""


def beyond_rounding(distances: Paired, rounded: Paired, ratio: float) -> bool:
    """Whether distances are more than ``ratio`` times those of rounding alone, beyond chance.

    By the mean of the differences and their spread. An outlier hurts one batch ten times as much as another, and four
    batches then have a spread above their mean: twice the ratio in every batch is no chance either.
    """
    beyond = distances - rounded.times(ratio)
    always = zip(distances.values, rounded.values, strict=True)
    return beyond.mean > beyond.spread or all(d > 2 * ratio * r for d, r in always)


def _screen(experiments: Experiments, judge: _Judge, found: Attribution) -> list[str]:
    """The sites to measure, in order; if there is no room for all, those of the worst groups of layers first."""
    plans = experiments.subject.plans
    room = experiments.left - _RESERVE
    if 2 * len(plans) <= room:
        return list(plans)
    groups = group_by_layer(plans)
    most = max(2, room // 4)
    names = list(groups)
    while len(names) > most:  # neighbours together
        merged = {}
        for first in range(0, len(names), 2):
            pair = names[first : first + 2]
            merged[" + ".join(pair)] = [site for name in pair for site in groups[name]]
        groups, names = merged, list(merged)
    experiments.expect(2 * len(groups) + room // 2)
    for name, sites in groups.items():
        if experiments.left < 2:
            break
        found.groups[name] = judge.measure(name, map(Part, sites))[2]
    worst = sorted(groups, key=lambda name: -found.groups.get(name, 0.0))
    return [site for name in worst for site in groups[name]]


def group_by_layer(plans: Mapping[str, SitePlan]) -> dict[str, list[str]]:
    """Sites by their name up to its first number: 'layers.3'; those without a number are groups of their own."""
    groups: dict[str, list[str]] = {}
    for name in plans:
        layer = re.match(r"(?:.*?\.)??\d+(?=\.|$)|.*?\.\d+(?=\.|$)", name)
        groups.setdefault(layer.group() if layer else name, []).append(name)
    return groups


def _rank(finding: Finding) -> tuple[bool, float, float]:
    return not finding.stands_out, -finding.excess, -finding.distance


def _ordered(
    sites: list[Finding], parts: Mapping[str, list[Finding]], plans: Mapping[str, SitePlan]
) -> list[Finding]:
    """Worst first; where one part explains a site that stands out, that part stands before it."""
    found = sorted([*sites, *(part for pieces in parts.values() for part in pieces)], key=_rank)
    for site in sites:
        part = explaining(site, parts.get(site.site, []), plans[site.site]) if site.stands_out else None
        if part is not None:
            found.remove(part)
            found.insert(found.index(site), replace(part, stands_out=True, why=part.why or site.why))
    return found


def explaining(site: Finding, parts: list[Finding], plan: SitePlan) -> Finding | None:
    """The part that costs what the site costs: of those that cost about as much the one with the fewest operands, a GEMM
    before an operand; None if several share it."""
    if not parts:
        return None
    most = max(part.excess for part in parts)
    if most < 0.7 * site.excess:
        return None
    near = [part for part in parts if part.excess >= 0.9 * most]
    return min(near, key=lambda part: (len(part.part.cells(plan)), part.gemm is None, -part.excess))

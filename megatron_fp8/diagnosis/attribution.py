"""Attributes the cost of FP8 to sites, GEMMs and operands.

FP8 rounds, and rounding alone changes every gradient by some per cent. A difference between FP8 and high
precision is therefore no finding. So each site is compared with its best case: the same operands are rounded
to as many significant bits, without underflow, saturation or scales. Any error beyond that comes from scales,
ranges or codes, and can be fixed.

Rejected: ranking by the signal-to-noise ratio of casts. It does not show how the loss depends on a tensor
(errors do not add: arXiv 2307.05657), and it misses a wrong product of correct casts. Rejected: reporting
every site whose error exceeds the spread and that of BF16: all normal sites do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from ..plan.site_plan import SitePlan
from .measurements import BatchValues, Experiments, VariantMeasurement, counted_parameters
from .variants import Part


@dataclass(frozen=True)
class Limits:
    """Thresholds beyond which a site or part stands out.

    Attributes:
        ratio: its distance from high precision, relative to the best case (``beyond_rounding``).
        bf16: its distance, relative to that of rounding everything to BF16.
        loss: its change of the loss, relative to the loss.
        refined: number of worst sites whose GEMMs and operands are measured separately.
    """

    ratio: float = 1.6
    bf16: float = 3.0
    loss: float = 0.005
    refined: int = 3


@dataclass(frozen=True)
class Finding:
    """Cost of one site, GEMM or operand in FP8, with everything else in high precision.

    Attributes:
        site, gemm, role: what runs in FP8: the site, or one GEMM (fprop, dgrad, wgrad) or operand (input, weight,
            grad_output) of it; gemm and role are None otherwise.
        loss_change, loss_spread: mean over batches, and its statistical uncertainty.
        gradient_error, cosine: over all parameters, relative to the gradient in high precision.
        bias: error of the gradient's mean over batches.
        distance, at_best: root mean square of the errors of all parameter tensors, in FP8 and in the best
            case (rounding only).
        excess: the part of distance beyond at_best (as a difference of squares).
        update_error: error of the optimizer's update; None if unknown.
        worst_parameter, worst_error: the parameter with the largest gradient error, and that error.
        stands_out, why: whether it costs more than rounding does, and by which measure.
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
        """The site, GEMM or operand."""
        return Part(self.site, self.gemm, self.role)

    @property
    def key(self) -> str:
        """Its key in overrides."""
        return self.part.key


@dataclass
class Attribution:
    """All measurements.

    Attributes:
        planned, at_best, bf16: all sites as planned, in the best case, and in BF16, against high precision.
        counted: parameters whose gradients are still meaningful after rounding to BF16.
        findings: worst first.
        groups: screened layer groups with their excess; empty if all sites were measured.
        skipped: sites left out because the budget was spent.
        sum_alone: sum of the loss changes of all sites alone; None if some were not measured.
    """

    planned: VariantMeasurement
    at_best: VariantMeasurement
    bf16: VariantMeasurement
    counted: list[str]
    findings: list[Finding] = field(default_factory=list)
    groups: dict[str, float] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    sum_alone: float | None = None

    @property
    def interaction(self) -> float | None:
        """Loss change of all sites together, minus the sum of each alone."""
        return None if self.sum_alone is None else self.planned.loss_changes.mean - self.sum_alone


def attribute(experiments: Experiments, limits: Limits) -> Attribution:
    """Measure all sites together, then groups of layers if the budget is too small for all sites, then sites, then
    parts of the worst."""
    variants, plans = experiments.variants, experiments.runner.plans
    experiments.expect(3 + 2 * len(plans) + 12)
    all_parts = [Part(name) for name in plans]
    bf16 = experiments.measure(variants.bf16)
    judge = _PartTest(experiments, limits, bf16)
    found = Attribution(
        experiments.measure(variants.planned),
        experiments.measure(variants.at_best("all", all_parts)),
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
    found.findings = _sort(sites, parts, plans)
    return found


_RESERVE = 20
"""Variants reserved for parts of the worst site and for the search of overrides."""


class _PartTest:
    """Measures parts and decides whether they stand out."""

    def __init__(self, experiments: Experiments, limits: Limits, bf16: VariantMeasurement):
        self._experiments, self._limits, self._bf16 = experiments, limits, bf16
        self.counted = counted_parameters(bf16)

    def finding(self, part: Part) -> Finding:
        """The finding for one part."""
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

    def measure(
        self, name: str, parts: Iterable[Part]
    ) -> tuple[VariantMeasurement, VariantMeasurement, float]:
        """(these parts alone in FP8, their best case, the distance beyond the best case)."""
        variants, parts = self._experiments.variants, list(parts)
        alone = self._experiments.measure(variants.alone(name, parts))
        best = self._experiments.measure(variants.at_best(name, parts))
        squares = alone.distances(self.counted).mean ** 2 - best.distances(self.counted).mean ** 2
        return alone, best, math.sqrt(max(squares, 0.0))

    def _why(self, alone: VariantMeasurement, best: VariantMeasurement) -> str:
        """The measure by which it stands out, as text; '' if it does not."""
        limits, counted = self._limits, self.counted
        if not alone.finite:
            return "not finite in FP8, finite in high precision"
        distances, rounded = alone.distances(counted), best.distances(counted)
        floor = limits.bf16 * self._bf16.distances(counted).mean
        if beyond_rounding(distances, rounded, limits.ratio) and distances.mean > floor:
            times = distances.mean / rounded.mean if rounded.mean else math.inf
            return f"gradient error {times:.3g} times that of rounding alone"
        change, least = alone.loss_changes, abs(fmean(self._experiments.losses)) * limits.loss
        floors = (
            change.spread,
            least,
            limits.bf16 * abs(self._bf16.loss_changes.mean),
            limits.ratio * abs(best.loss_changes.mean),
        )
        if change.mean > max(floors):
            return f"loss {change.mean:+.3g}, by rounding alone {best.loss_changes.mean:+.3g}"
        return ""


def beyond_rounding(distances: BatchValues, rounded: BatchValues, ratio: float) -> bool:
    """Whether distances significantly exceed ``ratio`` times those of rounding alone.

    The test uses the mean and the spread of paired differences. An outlier may affect one batch ten times as
    much as another, so with four batches the spread exceeds the mean; therefore twice the ratio in every
    batch also counts.
    """
    beyond = distances - rounded.times(ratio)
    pairs = zip(distances.values, rounded.values, strict=True)
    return beyond.mean > beyond.spread or all(d > 2 * ratio * r for d, r in pairs)


def _screen(experiments: Experiments, judge: _PartTest, found: Attribution) -> list[str]:
    """The sites to measure, in order. If the budget is too small for all, those of the worst layer groups come
    first."""
    plans = experiments.runner.plans
    budget = experiments.left - _RESERVE
    if 2 * len(plans) <= budget:
        return list(plans)
    groups = group_by_layer(plans)
    most = max(2, budget // 4)
    names = list(groups)
    while len(names) > most:  # merge neighbours
        merged = {}
        for first in range(0, len(names), 2):
            pair = names[first : first + 2]
            merged[" + ".join(pair)] = [site for name in pair for site in groups[name]]
        groups, names = merged, list(merged)
    experiments.expect(2 * len(groups) + budget // 2)
    for name, sites in groups.items():
        if experiments.left < 2:
            break
        found.groups[name] = judge.measure(name, map(Part, sites))[2]
    worst = sorted(groups, key=lambda name: -found.groups.get(name, 0.0))
    return [site for name in worst for site in groups[name]]


def group_by_layer(plans: Mapping[str, SitePlan]) -> dict[str, list[str]]:
    """Groups sites by their name up to its first number: 'layers.3'. Sites without a number each form their own
    group."""
    groups: dict[str, list[str]] = {}
    for name in plans:
        layer = re.match(r"(?:.*?\.)??\d+(?=\.|$)|.*?\.\d+(?=\.|$)", name)
        groups.setdefault(layer.group() if layer else name, []).append(name)
    return groups


def _rank(finding: Finding) -> tuple[bool, float, float]:
    return not finding.stands_out, -finding.excess, -finding.distance


def _sort(
    sites: list[Finding], parts: Mapping[str, list[Finding]], plans: Mapping[str, SitePlan]
) -> list[Finding]:
    """Worst first. If one part explains a site that stands out, the part precedes the site."""
    found = sorted([*sites, *(part for pieces in parts.values() for part in pieces)], key=_rank)
    for site in sites:
        part = find_cause(site, parts.get(site.site, []), plans[site.site]) if site.stands_out else None
        if part is not None:
            found.remove(part)
            found.insert(found.index(site), replace(part, stands_out=True, why=part.why or site.why))
    return found


def find_cause(site: Finding, parts: list[Finding], plan: SitePlan) -> Finding | None:
    """The part that accounts for the site's cost: among parts of about the same cost the one with the fewest operands,
    GEMMs before operands. None if several parts share the cost."""
    if not parts:
        return None
    most = max(part.excess for part in parts)
    if most < 0.7 * site.excess:
        return None
    candidates = [part for part in parts if part.excess >= 0.9 * most]
    return min(candidates, key=lambda part: (len(part.part.cells(plan)), part.gemm is None, -part.excess))

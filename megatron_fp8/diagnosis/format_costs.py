"""Cost of each GEMM in several formats, and the cheapest plan within a loss budget.

Each GEMM (fprop, dgrad, wgrad of a site) runs alone in each format, with everything else in high precision. Its cost is
a share of the loss, with two parts:

* the rise of the loss, relative to the loss; a fall counts as 0. dgrad and wgrad have none: the loss of a batch is known
  before they run;
* the squared ``distance`` of the gradient from high precision (measurements.py). A step along a gradient with relative
  noise d gains 1 / (1 + d^2) of what it would gain (McCandlish et al., arXiv 1812.06162). So training loses at most d^2
  of its remaining gain, which is at most the loss. The batch's own noise, beside which d matters less, is left out.

Independent errors add by their squares, so costs of several GEMMs are summed. They are not quite independent: the chosen
plan runs once as a whole, and if that costs more than the budget, a cheaper one is chosen.

The time of a GEMM is its FLOPs times ``RELATIVE_TIME``: ratios of hardware peaks, no measurement; casts are left out.

Rejected: the loss after one optimizer step: it hardly changes in one step, so that a useless wgrad would look free.
Rejected: an exact search (a knapsack). The greedy choice is at most one step from it, and the sum is less exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Protocol

from ..files.strict_json import nonfinite_as_text
from ..linear.gemm_site import GemmSite
from ..plan.timing import table
from ..recipe import GEMM_OPERANDS, RECIPES, Recipe
from ..state.collectives import union
from .measurements import Experiments, Progress, VariantMeasurement, counted_parameters
from .model_runner import ModelRunner
from .variants import Variant, planned_cells, use_variant

HIGH_PRECISION = "bf16"
FORMATS = tuple(name for name in RECIPES if name not in ("delayed", "custom"))
"""Recipes that can be measured: the others need a history, or a user's function."""

LOSS_BUDGET = 0.01

_TRIALS = 4  # plans that run as a whole
_MOST_ROWS = 24

Gemm = tuple[str, str]
"""A site and one of its GEMMs."""

Plan = Mapping[str, Mapping[str, str]]
"""Site -> GEMM -> format."""


def relative_time(fmt: str) -> float:
    """Time of a GEMM in this format over BF16's, by the peaks of hardware that runs it natively."""
    return {HIGH_PRECISION: 1.0, "nvfp4": 0.25}.get(fmt, 0.5)


class PlannableRunner(ModelRunner, Protocol):
    """A model whose sites can run with other plans."""

    def site_with(self, name: str, overrides: Mapping[str, Any]) -> GemmSite:
        """This rank's site of that name, as it would be planned with these overrides after the model's own."""

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name with the model's options."""


@dataclass(frozen=True)
class GemmCost:
    """Cost of one GEMM in one format, with everything else in high precision.

    Attributes:
        site, gemm, format: what ran.
        loss_change, loss_spread: mean over batches, and its statistical uncertainty.
        distance: of the gradient from high precision.
        cost: share of the loss.
    """

    site: str
    gemm: str
    format: str
    loss_change: float
    loss_spread: float
    distance: float
    cost: float


@dataclass
class FormatPlan:
    """The result.

    Attributes:
        formats: that were measured, besides high precision.
        budget: share of the loss.
        costs: of every GEMM in every format.
        flops: site -> of one of its GEMMs, of one microbatch or more.
        loss: mean in high precision.
        gemms: the plan; empty if no GEMM fits the budget.
        time: of the planned sites' GEMMs over BF16's, by ``relative_time``.
        summed: of the plan's costs.
        whole: of the plan as a whole; 0 without a plan.
        loss_change, loss_spread, distance: of the plan as a whole.
        passes: number of passes run.
    """

    formats: tuple[str, ...]
    budget: float
    costs: list[GemmCost]
    flops: dict[str, int]
    loss: float
    gemms: dict[str, dict[str, str]] = field(default_factory=dict)
    time: float = 1.0
    summed: float = 0.0
    whole: float = 0.0
    loss_change: float = 0.0
    loss_spread: float = 0.0
    distance: float = 0.0
    passes: int = 0

    @property
    def overrides(self) -> dict[str, str]:
        """For ``fp8_overrides`` and Fp8Config(overrides=...)."""
        return overrides_of(self.gemms)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; NaN and Inf as texts."""
        times = {name: relative_time(name) for name in (HIGH_PRECISION, *self.formats)}
        plain: dict[str, Any] = nonfinite_as_text(
            {**asdict(self), "relative_time": times, "overrides": self.overrides}
        )
        return plain


def check_formats(text: str) -> tuple[str, ...]:
    """Parses names separated by commas; high precision is always measured and not returned. Raises ValueError."""
    names = dict.fromkeys(name.strip() for name in text.split(","))
    for name in names:
        if name not in (HIGH_PRECISION, *FORMATS):
            raise ValueError(
                f"--formats {text}: {name!r} must be one of {', '.join((HIGH_PRECISION, *FORMATS))}"
            )
    found = tuple(name for name in names if name != HIGH_PRECISION)
    if not found:
        raise ValueError(f"--formats {text} names no format besides {HIGH_PRECISION}: add nvfp4 or mxfp8")
    return found


def check_passes(passes: int, batches: int, sites: int, formats: Sequence[str]) -> int:
    """Returns the passes that a measurement may need. Raises ValueError if these are too few."""
    gemms = len(GEMM_OPERANDS) * sites
    needed = batches * (2 + len(formats) * gemms + _TRIALS) + 1  # high precision, BF16; the plan; FLOPs
    if passes < needed:
        raise ValueError(
            f"--budget {passes}: {gemms} GEMMs in {len(formats)} formats need {needed} passes; give that many, or fewer"
            " formats"
        )
    return needed


def measure_formats(
    runner: PlannableRunner,
    formats: Sequence[str],
    loss_budget: float,
    passes: int,
    progress: Callable[[Progress], None] = lambda _: None,
) -> FormatPlan:
    """Measure each GEMM in each format, choose the cheapest plan within the budget, and run it. Collective.

    Args:
        formats: as ``check_formats`` returns them.
        loss_budget: largest cost of the plan, as a share of the loss.
        passes: budget of passes.

    Raises ValueError: too few passes, or high precision is not finite.
    """
    needed = check_passes(passes, runner.batches, len(runner.plans), formats)
    experiments = Experiments(runner, passes, progress)
    experiments.expect(needed // runner.batches)
    if experiments.useless is not None:
        raise ValueError(
            f"nothing can be measured at this checkpoint: in high precision, {experiments.useless}"
        )
    with use_variant(experiments.variants.bf16, runner.sites) as simulated:
        runner.run(0)
    flops = union({name: site.flops for name, site in simulated.items()})
    trial = _Trial(experiments, runner)
    costs = [
        trial.alone(site, gemm, fmt) for site in runner.plans for gemm in GEMM_OPERANDS for fmt in formats
    ]
    found = FormatPlan(tuple(formats), loss_budget, costs, flops, fmean(experiments.losses))
    allowed = loss_budget
    for number in range(_TRIALS):
        chosen = choose_plan(costs, flops, allowed)
        plan = _by_site(chosen)
        if plan == found.gemms:
            break
        trial.run_whole(found, plan, number)
        if found.whole <= loss_budget:
            break
        allowed = found.summed * loss_budget / found.whole
    found.passes = experiments.passes + 1
    return found


class _Trial:
    """Runs sites with other plans."""

    def __init__(self, experiments: Experiments, runner: PlannableRunner):
        self._experiments, self._runner = experiments, runner
        self._counted = counted_parameters(experiments.measure(experiments.variants.bf16))
        self._losses = experiments.losses

    def alone(self, site: str, gemm: str, fmt: str) -> GemmCost:
        """One GEMM in a format, everything else in high precision."""
        only = {**dict.fromkeys(GEMM_OPERANDS, HIGH_PRECISION), gemm: fmt}
        found = self._measure(f"{site}:{gemm} in {fmt}", {site: only})
        change, distance = found.loss_changes, found.distances(self._counted).mean
        return GemmCost(site, gemm, fmt, change.mean, change.spread, distance, self._cost(found))

    def run_whole(self, found: FormatPlan, plan: Plan, number: int) -> None:
        """Run a plan and write what it costs into the result."""
        found.gemms = {site: dict(gemms) for site, gemms in plan.items()}
        found.time = time_of(plan, found.flops)
        found.summed = sum(cost.cost for cost in found.costs if plan[cost.site][cost.gemm] == cost.format)
        if not overrides_quantize(plan):
            found.gemms, found.whole, found.time = {}, 0.0, 1.0
            found.loss_change = found.loss_spread = found.distance = 0.0
            return
        measured = self._measure(f"the plan, choice {number + 1}", plan)
        found.whole, found.distance = self._cost(measured), measured.distances(self._counted).mean
        found.loss_change, found.loss_spread = measured.loss_changes.mean, measured.loss_changes.spread

    def _measure(self, name: str, plan: Plan) -> VariantMeasurement:
        planned = {
            site: self._runner.site_with(site, overrides_of({site: gemms}))
            for site, gemms in plan.items()
            if site in self._runner.sites
        }
        quantized = {site: planned_cells(there.plan) for site, there in planned.items()}
        return self._experiments.measure(Variant(name, quantized, planned=planned))

    def _cost(self, measured: VariantMeasurement) -> float:
        if not measured.finite:
            return math.inf
        rise = max(measured.loss_changes.mean, 0.0) / abs(fmean(self._losses))
        return rise + measured.distances(self._counted).mean ** 2


def choose_plan(costs: Sequence[GemmCost], flops: Mapping[str, int], budget: float) -> dict[Gemm, str]:
    """Greedy choice: the steps to faster formats that save most time for their cost, as long as the sum of all costs
    stays within the budget. Returns the format of every GEMM."""
    by_gemm: dict[Gemm, list[GemmCost]] = {}
    for cost in costs:
        by_gemm.setdefault((cost.site, cost.gemm), []).append(cost)
    steps = [step for gemm, those in by_gemm.items() for step in _steps(gemm, those, flops[gemm[0]])]
    chosen, spent = dict.fromkeys(by_gemm, HIGH_PRECISION), 0.0
    for step in sorted(steps, key=lambda step: -step.worth):  # stable: steps of one GEMM stay in order
        if chosen[step.gemm] == step.before and spent + step.added <= budget:
            chosen[step.gemm] = step.after
            spent += step.added
    return chosen


@dataclass(frozen=True)
class _Step:
    """From one format of a GEMM to a faster one. ``worth``: time saved for the cost added."""

    gemm: Gemm
    before: str
    after: str
    added: float
    worth: float


def _steps(gemm: Gemm, costs: Sequence[GemmCost], flops: int) -> list[_Step]:
    """The steps of one GEMM, from high precision on, each worth less than the one before it."""
    costs = [cost for cost in costs if math.isfinite(cost.cost)]
    found, now, spent = [], HIGH_PRECISION, 0.0
    while faster := [cost for cost in costs if relative_time(cost.format) < relative_time(now)]:
        steps = []
        for cost in faster:
            saved = flops * (relative_time(now) - relative_time(cost.format))
            added = max(cost.cost - spent, 0.0)
            steps.append((saved / added if added else math.inf, saved, cost, added))
        worth, _, best, added = max(steps, key=lambda step: step[:2])
        found.append(_Step(gemm, now, best.format, added, worth))
        now, spent = best.format, max(best.cost, spent)
    return found


def _by_site(chosen: Mapping[Gemm, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for (site, gemm), fmt in chosen.items():
        found.setdefault(site, {})[gemm] = fmt
    return found


def time_of(plan: Plan, flops: Mapping[str, int]) -> float:
    """Time of a plan's GEMMs over BF16's."""
    total = sum(flops[site] * len(gemms) for site, gemms in plan.items())
    return (
        sum(flops[site] * relative_time(fmt) for site, gemms in plan.items() for fmt in gemms.values())
        / total
    )


def overrides_quantize(plan: Plan) -> bool:
    """Whether any GEMM leaves high precision."""
    return any(fmt != HIGH_PRECISION for gemms in plan.values() for fmt in gemms.values())


def overrides_of(plan: Plan) -> dict[str, str]:
    """Overrides that give every GEMM its format, whatever precedes them: a site's most frequent one, then exceptions."""
    found = {}
    for site, gemms in plan.items():
        ((most, _),) = Counter(gemms.values()).most_common(1)
        found[site] = most
        found |= {f"{site}:{gemm}": fmt for gemm, fmt in gemms.items() if fmt != most}
    return found


# --------------------------------------------------------------------------------------------------------------- text


def plan_text(found: FormatPlan) -> str:
    """The result in a paragraph, the plan first."""
    times = ", ".join(f"{name} {relative_time(name):g}" for name in (HIGH_PRECISION, *found.formats))
    budget = f"{found.budget:.3g} of the loss ({found.loss:.4g})"
    if not found.gemms:
        return f"No GEMM costs less than {budget} in {' or '.join(found.formats)}: there is no plan."
    counts = Counter(fmt for gemms in found.gemms.values() for fmt in gemms.values())
    parts = ", ".join(f"{count} in {fmt}" for fmt, count in counts.most_common())
    verdict = (
        "" if found.whole <= found.budget else " That is above the budget: the costs do not add up here."
    )
    return (
        f"The cheapest plan within {budget}: {parts}. These GEMMs take {found.time:.3g} of BF16's time by peak rates"
        f" ({times}; casts and all other work left out, nothing measured). Alone they cost {found.summed:.3g} in sum,"
        f" as a whole {found.whole:.3g}: the loss changes by {found.loss_change:+.4f} +- {found.loss_spread:.4f}, the"
        f" gradient is {found.distance:.3f} from high precision.{verdict}"
    )


def format_table(found: FormatPlan) -> str:
    """The costs by GEMM, the largest first: with one column of costs for each format, and the plan."""
    total = sum(found.flops[site] for site in found.flops) * len(GEMM_OPERANDS)
    rows: dict[Gemm, dict[str, GemmCost]] = {}
    for cost in found.costs:
        rows.setdefault((cost.site, cost.gemm), {})[cost.format] = cost
    order = sorted(rows, key=lambda gemm: -max(cost.cost for cost in rows[gemm].values()))
    header = ["GEMM", "FLOPs", *(f"{fmt}: loss, distance, cost" for fmt in found.formats), "plan"]
    lines = [
        [
            f"{site}:{gemm}",
            f"{found.flops[site] / total:.1%}",
            *(_cell(rows[site, gemm][fmt]) for fmt in found.formats),
            found.gemms.get(site, {}).get(gemm, HIGH_PRECISION),
        ]
        for site, gemm in order[:_MOST_ROWS]
    ]
    hidden = len(order) - _MOST_ROWS
    return table(header, lines) + (f"\n... and {hidden} cheaper ones, in the figures" if hidden > 0 else "")


def _cell(cost: GemmCost) -> str:
    if not math.isfinite(cost.cost):
        return "not finite"
    return f"{cost.loss_change:+.4f}, {cost.distance:.4f}, {cost.cost:.2g}"

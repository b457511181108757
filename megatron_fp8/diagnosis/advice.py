"""Advice from telemetry: a table of rules that map statistics to settings.

A rule covers one statistic of some tensors, for some recipes. It applies to a tensor if the statistic was
beyond the limit in at least two measured iterations (or in the only one). The limits are far from values of
normal training, where E4M3 codes have an SQNR of 31 dB, E5M2 codes 25 dB, and less than 0.2 % of the values
underflow or saturate. The rules ignore the loss: a diagnosis measures what FP8 costs, and advice says where
to look first. Besides the rules, a loss that rose while codes were good is not attributed to FP8.

Rejected: one score per tensor. It would not show which statistic is bad.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..numerics.formats import E4M3, E5M2
from ..telemetry.health import by_origin, is_of_forward
from ..train.run_record import RunRecord
from .training_faults import find_growth, find_loss_rise, find_spikes

OWN_SCALES = ("tensorwise", "rowwise", "delayed")
BLOCKS = ("blockwise", "mxfp8")
_LARGEST = {fmt.name: fmt.max for fmt in (E4M3, E5M2)}


@dataclass(frozen=True)
class Rule:
    """One rule: evidence, cause and remedy.

    Attributes:
        name: name of the rule.
        statistic: name of the statistic. ``limit``: the rule applies above it, or below it if ``below`` is
            set.
        tensors, recipes, formats: where the rule applies, by the site's plan in report.json. Empty:
            everywhere.
        cause: why it happens, in words.
        remedy: 'finer' (the next finer recipe for the site, chosen by what-ifs if measured), 'bf16', or an
            option.
        shown: other statistics to show.
        stale: applies only if most of the evidence has an outdated scale: made from an amax above STALE times
            the tensor's own.
    """

    name: str
    statistic: str
    limit: float
    cause: str
    remedy: str
    below: bool = False
    tensors: tuple[str, ...] = ("input", "weight", "grad_output")
    recipes: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    stale: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is beyond the limit."""
        return value < self.limit if self.below else value > self.limit


RULES = (
    Rule(
        "delayed scale too small", "overflows%", 0.5,
        "delayed scaling made the scale from earlier iterations, and this tensor has grown beyond it",
        "--model.fp8_amax_compute_algo=max --model.fp8_amax_history_len=16 --model.fp8_margin=1",
        recipes=("delayed",), shown=("cur_amax", "scale_inv_max"),
    ),
    Rule(
        "delayed scale too large", "underflows%", 5.0,
        "delayed scaling made the scale from a larger amax, or with a margin, and most of FP8's range goes unused",
        "finer", recipes=("delayed",), shown=("cur_amax", "scale_inv_max", "dynamic_range"), stale=True,
    ),
    Rule(
        "margin too large", "underflows%", 5.0,
        "fp8_margin (or fp8_amax_epsilon) makes the scale smaller than this tensor needs, and FP8's range goes unused",
        "--model.fp8_margin=0 --model.fp8_amax_epsilon=0", recipes=("tensorwise", "rowwise", "blockwise"),
        shown=("cur_amax", "scale_inv_max"), stale=True,
    ),
    Rule(
        "gradients too small for E4M3", "underflows%", 5.0,
        "gradients of very different size share a scale, and E4M3's range is 2^14 smaller than E5M2's",
        "--model.fp8=hybrid", tensors=("grad_output",), recipes=OWN_SCALES, formats=("e4m3",),
        shown=("dynamic_range", "kurtosis"),
    ),
    Rule(
        "one scale for too much", "underflows%", 5.0,
        "values of very different size share one scale: what is small becomes zero",
        "finer", recipes=OWN_SCALES, shown=("dynamic_range", "kurtosis", "sqnr_db"),
    ),
    Rule(
        "values lost inside blocks", "underflows%", 5.0,
        "values of very different size stand side by side in one block: what is small becomes zero",
        "bf16", recipes=BLOCKS, shown=("dynamic_range", "kurtosis", "sqnr_db"),
    ),
    Rule(
        "outliers take the precision", "sqnr_db", 20.0,
        "a few values are so much larger than the others that their scale leaves these no bits",
        "finer", below=True, formats=("e4m3",), shown=("kurtosis", "cur_amax", "std"),
    ),
    Rule(
        "outliers take the precision", "sqnr_db", 14.0,
        "a few values are so much larger than the others that their scale leaves these no bits",
        "finer", below=True, formats=("e5m2",), shown=("kurtosis", "cur_amax", "std"),
    ),
)  # fmt: skip

STALE = 2.0
"""Rounding a scale to a power of two loses less than this factor; a margin of one loses as much."""

FINER = {"delayed": BLOCKS, "tensorwise": BLOCKS, "rowwise": BLOCKS, "blockwise": (), "mxfp8": ()}
"""Recipe -> recipes with finer scales; none: only BF16 remains. For a stale scale current per-tensor scaling is also
tried."""

WHAT_IF = {"mxfp8": "mxfp8", "blockwise": "fp8_block_scaling", "tensorwise": "fp8_current_scaling"}


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        title: the problem, in a few words.
        cause: why, in a sentence.
        line: options of ``train``, ready to paste.
        sites: affected sites; empty: the whole run.
        tensor: the affected tensor of these sites; None: not a single one.
        figures: statistic -> value of the worst site in its worst iteration.
        iterations: first and last measured iteration with the problem; None: not tied to iterations.
    """

    title: str
    cause: str
    line: str
    sites: tuple[str, ...] = ()
    tensor: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    iterations: tuple[int, int] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "sites": list(self.sites), "iterations": list(self.iterations or ()) or None}

    def __str__(self) -> str:
        more = f" and {len(self.sites) - 1} more" if self.sites[1:] else ""
        sites = f"{self.sites[0]}{more}" if self.sites else "run"
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        iterations = (
            "" if self.iterations is None else f", iterations {self.iterations[0]}-{self.iterations[1]}"
        )
        shown = f" ({figures}{iterations})" if figures else ""
        tensor = f" {self.tensor}" if self.tensor else ""
        return f"{sites}{tensor}: {self.title}: {self.cause}{shown}. Try: {self.line}"


def advice_of(record: RunRecord, report: Mapping[str, Any]) -> list[Advice]:
    """Advice from a run's files. Raises ValueError for an invalid file."""
    metrics = [line.content for line in record.metrics()]
    return advise((line.content for line in record.telemetry()), report, metrics)


def advise(
    records: Iterable[Mapping[str, Any]], report: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]] = ()
) -> list[Advice]:
    """Advice for a run, most certain first; [] if no statistic is beyond a limit.

    Args:
        records: records of telemetry.jsonl.
        report: report.json.
        metrics: records of metrics.jsonl.
    """
    plans = {site["name"]: site for site in report.get("sites", ()) if site.get("precision") == "fp8"}
    series: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    weights: dict[str, dict[int, float]] = {}
    bad: list[Mapping[str, Any]] = []
    for record in map(_numbers, records):
        if record["tensor"] == "weight" and "l2_norm" in record:
            weights.setdefault(record["site"], {})[record["iteration"]] = record["l2_norm"]
        if record.get("nonfinite", 0) > 0:
            bad.append(record)
        if record["site"] in plans:
            series.setdefault((record["site"], record["tensor"]), []).append(record)
    # NaN ruins all statistics of its iteration, so rules read the others.
    ruined = {record["iteration"] for record in bad}
    series = {key: [r for r in seen if r["iteration"] not in ruined] for key, seen in series.items()}
    ruled = _by_rules(series, plans)
    measured = {record["iteration"] for seen in series.values() for record in seen}
    spikes = [] if ruled else _spiked(metrics)
    # Spikes explain a loss that they raise.
    rise = [] if spikes else _loss_rise(metrics, ruled, measured)
    return [*_not_finite(bad, metrics), *rise, *_grown(weights), *ruled, *spikes, *_configuration(report)]


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record's finite values; the file may come from other software."""
    return {
        name: value
        for name, value in record.items()
        if name in ("site", "tensor") or (isinstance(value, (int, float)) and math.isfinite(value))
    }


def _by_rules(
    series: Mapping[tuple[str, str], list[Mapping[str, Any]]], plans: Mapping[str, Mapping[str, Any]]
) -> list[Advice]:
    """Sites with the same rule and remedy share one piece of advice. For each tensor only the first matching rule
    counts."""
    pieces: dict[tuple[str, str, str], list[tuple[str, list[Mapping[str, Any]], Rule]]] = {}
    for (site, tensor), measured in series.items():
        plan = plans[site]
        words = str((plan.get("roles") or {}).get(tensor) or "").split()
        for rule in RULES:
            applies = (not rule.recipes or plan["recipe"] in rule.recipes) and tensor in rule.tensors
            if not applies or not words or (rule.formats and words[0] not in rule.formats):
                continue
            violations = [r for r in measured if rule.statistic in r and rule.holds(r[rule.statistic])]
            if rule.stale:
                stale = [r for r in violations if _is_stale(r, words[0])]
                violations = stale if 2 * len(stale) > len(violations) else []
            if len(violations) >= min(2, len(measured)) and violations:
                remedy = _remedy(rule, str(plan["recipe"]), violations)
                pieces.setdefault((rule.name, tensor, remedy), []).append((site, violations, rule))
                break
    return [_advice(tensor, remedy, evidence) for (_, tensor, remedy), evidence in pieces.items()]


def _is_stale(record: Mapping[str, Any], format_name: str) -> bool:
    """Whether the scale was made from a larger amax than the tensor's. False if the statistics for this are missing."""
    if format_name not in _LARGEST or not {"scale_inv_max", "cur_amax"} <= record.keys():
        return False
    return record["scale_inv_max"] * _LARGEST[format_name] > STALE * record["cur_amax"]


def _remedy(rule: Rule, recipe: str, violations: list[Mapping[str, Any]]) -> str:
    """The option, 'bf16', or the name of a finer recipe. If what-ifs were measured, one that the rule does
    not apply to.

    Of several, the first within 3 dB of the best. SQNR alone is not enough: if one huge channel holds most of
    the signal, SQNR stays high although all other values become zero.
    """
    if rule.remedy != "finer":
        return rule.remedy
    choices = (*(("tensorwise",) if rule.stale else ()), *FINER.get(recipe, ()))
    if not choices:
        return "bf16"
    last = violations[-1]
    measured = {name: last.get(f"{WHAT_IF[name]}_{rule.statistic}") for name in choices}
    good = [name for name, value in measured.items() if value is not None and not rule.holds(value)]
    if not good:
        return choices[0] if set(measured.values()) == {None} else "bf16"
    gains = {name: last.get(f"{WHAT_IF[name]}_sqnr_db", -math.inf) for name in good}
    return next(name for name, gain in gains.items() if gain >= max(gains.values()) - 3.0)


def _advice(tensor: str, remedy: str, evidence: list[tuple[str, list[Mapping[str, Any]], Rule]]) -> Advice:
    rule = evidence[0][2]

    def worst(violations: list[Mapping[str, Any]]) -> Mapping[str, Any]:
        return min(violations, key=lambda r: r[rule.statistic] if rule.below else -r[rule.statistic])

    evidence = sorted(evidence, key=lambda one: worst(one[1])[rule.statistic], reverse=not rule.below)
    first = worst(evidence[0][1])
    figures = {name: first[name] for name in (rule.statistic, *rule.shown) if name in first}
    sites = tuple(site for site, _, _ in evidence)
    line = (
        remedy
        if remedy.startswith("--")
        else f"--model.fp8_overrides='{json.dumps(dict.fromkeys(sites, remedy))}'"
    )
    iterations = [record["iteration"] for _, violations, _ in evidence for record in violations]
    return Advice(rule.name, rule.cause, line, sites, tensor, figures, (min(iterations), max(iterations)))


def _not_finite(bad: list[Mapping[str, Any]], metrics: Sequence[Mapping[str, Any]]) -> list[Advice]:
    """Reports the origin of NaN and Inf in the first bad iteration: within one iteration they spread.

    Nothing if only gradients overflowed and loss scaling then went on, which is how it finds its scale.
    """
    if not bad:
        return []
    first = min(record["iteration"] for record in bad)
    spread = by_origin(record for record in bad if record["iteration"] == first)
    origin, forward = spread[0], is_of_forward(spread[0])
    later = [m for m in metrics if m["iteration"] > first and not m.get("skipped")]
    goes_on = any(math.isfinite(m.get("lm_loss") or math.nan) for m in later)
    if goes_on and not forward and any(m.get("loss_scale") for m in metrics):
        return []
    earlier = min((m["iteration"] for m in metrics if m.get("nonfinite")), default=first)
    if origin["tensor"] == "weight":
        cause = "a weight itself is not finite: an optimizer step made it so, and no precision of GEMMs helps"
    elif forward:
        cause = (
            "the first measured iteration with NaN or Inf; they spread through all sites from there. FP8 saturates and"
            " makes no Inf: look whether high precision has it too"
        )
    else:
        cause = (
            "gradients alone have NaN or Inf, and they spread backwards from this site: if it is the model's last, they"
            " come from the loss (labels, loss mask)"
        )
    if earlier < first:
        cause += f". Casts met the first in iteration {earlier}, which was not measured"
    remedy = (
        "look at that iteration's batch"
        if goes_on
        else "--optimizer.lr=LOWER from a checkpoint before that iteration"
    )
    culprits = [record for record in spread if record["tensor"] == origin["tensor"]]
    return [
        Advice(
            "not finite", cause + ". Such steps are skipped, and the run went on" * goes_on,
            f"{remedy}; and megatron-fp8 diagnose RUN --iteration {min(first, earlier)}",
            tuple(record["site"] for record in culprits), origin["tensor"], {"nonfinite": origin["nonfinite"]},
            (first, first),
        )
    ]  # fmt: skip


def _loss_rise(
    metrics: Sequence[Mapping[str, Any]], ruled: list[Advice], measured: Iterable[int]
) -> list[Advice]:
    """Reports a loss that rose before any tensor's codes were bad, so not because of FP8. (A diverging model
    ruins its codes too, but later.)

    Not every iteration is measured. A small rise is attributed to the model only if the codes were good in
    that iteration or later.
    """
    rise = find_loss_rise(metrics)
    if rise is None:
        return []
    bad = min((piece.iterations[0] for piece in ruled if piece.iterations is not None), default=math.inf)
    last_good = max((iteration for iteration in measured if iteration < bad), default=-math.inf)
    if bad < rise.iteration or (bad < math.inf and rise.noise is not None and last_good < rise.iteration):
        return []
    return [
        Advice(
            "the loss rose first", "no codes of FP8 were bad until then: the learning rate or the data, rather than FP8."
            " megatron-fp8 diagnose RUN says whether high precision has it too",
            "--optimizer.lr=LOWER --optimizer.clip_grad=1.0",
            figures={
                "lm_loss": rise.loss,
                "lm_loss before": rise.before,
                **({} if rise.noise is None else {"noise of lm_loss": rise.noise}),
            },
            iterations=(rise.iteration, rise.iteration),
        )
    ]  # fmt: skip


def _spiked(metrics: Sequence[Mapping[str, Any]]) -> list[Advice]:
    """Reports spikes of the gradient norm while all codes are good: not caused by FP8."""
    spikes = find_spikes(metrics)
    if spikes is None:
        return []
    figures = {"grad_norm": spikes.norm, "median grad_norm": spikes.usual, "spikes": float(spikes.number)}
    return [
        Advice(
            "gradient spikes", "the gradient's norm has spikes while no FP8 codes are bad: the learning rate or the data",
            "--optimizer.lr=LOWER --optimizer.clip_grad=1.0", figures=figures, iterations=(spikes.first, spikes.last),
        )
    ]  # fmt: skip


def _grown(weights: Mapping[str, Mapping[int, float]]) -> list[Advice]:
    """Reports weights that outgrow the same linear of other layers: they ruin codes, but FP8 did not make them grow."""
    return [
        Advice(
            "a weight outgrows the others", "it grows faster than that linear's weight in other layers: its own learning"
            " rate (parameter group) or gradients, rather than FP8",
            f"--optimizer.lr=LOWER for it, from a checkpoint before iteration {growth.iteration}",
            (growth.site,), "weight", {"growth of l2_norm": growth.factor, "of other layers": growth.others},
            (growth.iteration, growth.last),
        )
        for growth in find_growth(weights)
    ]  # fmt: skip


def _configuration(report: Mapping[str, Any]) -> list[Advice]:
    """Advice based on the configuration alone."""
    precision = report.get("precision") or {}
    if precision.get("fp8") != "hybrid" or precision.get("fp8_recipe") != "mxfp8":
        return []
    return [
        Advice(
            "gradients lose a bit for nothing",
            "each block of 32 has its own scale, so gradients need no E5M2 range, and E4M3 has one bit of mantissa more"
            " (6 dB)",
            "--model.fp8=e4m3",
        )
    ]

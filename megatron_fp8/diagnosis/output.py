"""A diagnosis for people: its verdict in words, its table, plot and file of overrides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ..plan.timing import table
from .attribution import Attribution, Finding, Limits
from .override_search import Remedy

if TYPE_CHECKING:
    from .diagnosis import Diagnosis


def bad_in_high_precision(what: str) -> str:
    """The verdict if high precision gives NaN, Inf or no gradient."""
    return (
        f"FP8 is not the cause: it is bad in high precision too. With every GEMM in high precision {what}, so nothing can"
        " be said of what FP8 costs; look at the model, its data and the learning rate."
    )


def verdict(found: Attribution, remedy: Remedy, losses: tuple[float, ...], good_loss: float | None) -> str:
    """One paragraph, the answer first. ``losses``: in high precision."""
    outstanding = [finding for finding in found.findings if finding.stands_out]
    mean = fmean(losses)
    also = ""
    if good_loss is not None and mean - 2 * stdev(losses) > good_loss:
        also = f"in high precision the loss is bad too, {mean:.4g} where it was {good_loss:.4g}"
    lines = [_answer(found, outstanding, also)]
    lines += [_finding_text(finding) for finding in _first_per_site(outstanding)[:4]]
    lines.append(_all_sites(found, mean))
    if remedy.parts:
        lines.append(_override_text(remedy))
    elif outstanding:
        lines.append("Taking what stands out into high precision does not bring the gradient nearer.")
    if found.skipped:
        lines.append(f"{len(found.skipped)} sites were not measured alone: the budget of passes was spent.")
    return " ".join(lines)


def excess_distance(found: Attribution, limits: Limits) -> float | None:
    """Distance of all sites together from high precision, relative to rounding alone; None if within the limit."""
    distances, best = (measured.distances(found.counted) for measured in (found.planned, found.at_best))
    times = distances.mean / best.mean if best.mean else 1.0
    return times if times > limits.ratio else None


def _answer(found: Attribution, outstanding: list[Finding], also: str) -> str:
    """Whether FP8 is the cause. ``also``: what is bad in high precision too, '' if nothing is."""
    if outstanding:
        sites = list(dict.fromkeys(finding.site for finding in outstanding))
        where = sites[0] if len(sites) == 1 else f"{len(sites)} sites, most in {sites[0]}"
        costs = f"FP8 costs more than it has to in {where}"
        return f"FP8 is not the only cause: {also}; and {costs}." if also else f"{costs}."
    unknown = _far_off_text(found)
    if unknown:
        part = f"a part of the cause: {also}" if also else "the cause"
        return f"Not known whether FP8 is {part}. {unknown}"
    if also:
        return f"FP8 is not the cause: {also}. Look at the learning rate and the data."
    who = "all sites together cost no" if found.skipped else "no site costs"
    return (
        f"FP8 is not the cause at this checkpoint: {who} more than rounding to FP8's significant bits does. If training"
        " goes wrong here, look at the learning rate, the data or the model."
    )


def _far_off_text(found: Attribution) -> str:
    """How far off the plan is although no site stands out; '' if it is near."""
    times = excess_distance(found, Limits())
    if times is None:
        return ""
    as_planned = (
        f"as planned the gradient is {times:.3g} times as far from high precision as rounding to FP8's significant bits"
        " puts it"
    )
    if found.skipped:
        return f"Of what was measured alone nothing stands out, and {as_planned}: a larger budget would tell where."
    return (
        f"Nothing stands out in all batches alike, and {as_planned}; {found.findings[0].key} has most of that. More"
        " batches would tell whether it is chance."
    )


def _first_per_site(outstanding: list[Finding]) -> list[Finding]:
    first: dict[str, Finding] = {}
    for finding in outstanding:
        first.setdefault(finding.site, finding)
    return list(first.values())


def _finding_text(finding: Finding) -> str:
    figures = ""
    if math.isfinite(finding.gradient_error) and math.isfinite(finding.loss_change):
        figures = (
            f" (gradient error {_percent(finding.gradient_error)}, loss {finding.loss_change:+.3g};"
            f" {finding.worst_parameter} {_percent(finding.worst_error)})"
        )
    return f"{finding.key} in FP8 alone: {finding.why}{figures}."


def _all_sites(found: Attribution, mean: float) -> str:
    planned, best = found.planned, found.at_best
    change = planned.loss_changes
    if not planned.finite:
        return f"As planned, losses or gradients are not finite; in high precision the loss is {mean:.4g}."
    sure = "" if abs(change.mean) > change.spread else f", within its spread of {change.spread:.2g}"
    return (
        f"As planned the loss is {mean + change.mean:.4g}, in high precision {mean:.4g} ({change.mean:+.2g}{sure}); the"
        f" gradient is off by {_percent(planned.gradient_errors.mean)}; rounding to FP8's bits alone would give"
        f" {_percent(best.gradient_errors.mean)}, rounding to BF16 {_percent(found.bf16.gradient_errors.mean)}."
    )


def _override_text(remedy: Remedy) -> str:
    back = (
        ""
        if remedy.recovered is None
        else f" gives back {_percent(remedy.recovered)} of what stands out costs"
    )
    short = "" if remedy.complete else "; that is less than was asked for"
    return f"In high precision, {', '.join(part.key for part in remedy.parts)}{back}{short}."


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %" if math.isfinite(value) else "beyond any number"


def overrides_text(overrides: Mapping[str, Any], remedy: Remedy) -> str:
    """YAML of overrides, with a comment on what they recover."""
    import yaml

    recovered = ""
    if remedy.recovered is not None:
        recovered = f" They give back {remedy.recovered:.0%} of that at this checkpoint."
    head = f"# Costs more in FP8 than it has to, by megatron-fp8 diagnose.{recovered}\n"
    return head + yaml.safe_dump(dict(overrides), sort_keys=False, width=1000)


_MOST_ROWS = 24
"""Rows of the table, and bars of the plot."""


def format_table(ranking: list[Finding]) -> str:
    """The ranking, worst first."""
    if not ranking:
        return "nothing could be measured"
    header = ["in FP8 alone", "error", "distance", "beyond rounding", "loss", "stands out by"]
    rows = [
        [
            finding.key,
            f"{finding.gradient_error:.2%}",
            f"{finding.distance:.4f}",
            f"{finding.excess:.4f}",
            f"{finding.loss_change:+.4f} +- {finding.loss_spread:.4f}"
            if math.isfinite(finding.loss_change)
            else "not finite",
            finding.why,
        ]
        for finding in ranking[:_MOST_ROWS]
    ]
    hidden = len(ranking) - _MOST_ROWS
    return table(header, rows) + (f"\n... and {hidden} more, in the figures" if hidden > 0 else "")


def draw(diagnosis: Diagnosis, path: Path, title: str) -> None:
    """Plot of the worst findings: bars for their distance in FP8, and marks for rounding alone.

    Raises OSError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    findings = list(reversed(diagnosis.ranking[:_MOST_ROWS]))
    figure = Figure(figsize=(9, 1.6 + 0.28 * len(findings)), layout="constrained")
    axes = figure.subplots()
    positions = range(len(findings))
    colors = ["#c0392b" if finding.stands_out else "#7f8c8d" for finding in findings]
    axes.barh(positions, [finding.distance for finding in findings], color=colors, height=0.7)
    axes.plot(
        [finding.at_best for finding in findings], positions, "k|", markersize=9, label="rounding alone"
    )
    axes.set_yticks(positions, [finding.key for finding in findings], fontsize=8)
    axes.set_xlabel("distance of the gradient from high precision, this alone in FP8 (red: stands out)")
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)

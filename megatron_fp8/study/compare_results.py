"""Results of a comparison: values for each recipe, a verdict, tables in Markdown, a picture.

A recipe's loss is compared with that of high precision for the same seed, since both started from the same
weights and read the same batches. The band is the range of high precision's own losses over the seeds: the
effect of chance. A difference of means over all seeds would ignore the pairing, and a single seed has no
band.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..files.records import Line
from ..plan.timing import table
from ..train.run_record import RunRecord
from . import StudyFailed
from .compare_plan import BASELINE, Comparison, PlannedRun
from .plots import recipe_colour

FORMAT = "megatron_fp8 comparison 1"


@dataclass(frozen=True)
class Outcome:
    """Result of one run.

    Attributes:
        loss: of the last validation, in nats per token; without validation the mean of the last tenth of
            training.
        losses: of each iteration, None if not finite.
        tokens_per_s: median over iterations without the first.
        saved_bytes: bytes a micro-batch saves for backward on the first rank; None: not counted.
        peak_bytes: peak on the first rank: allocated on a GPU, or resident on a CPU.
        fp8_gemms, hp_gemms: linear GEMMs of the last iteration on the first rank, in FP8 and in high
            precision.
    """

    recipe: str
    seed: int
    folder: str
    loss: float
    losses: list[float | None]
    tokens_per_s: float
    saved_bytes: int | None
    peak_bytes: int
    fp8_gemms: int
    hp_gemms: int
    skipped: int


@dataclass(frozen=True)
class Band:
    """High precision over the seeds: mean loss, sample standard deviation (0 for one seed), range."""

    seeds: int
    mean: float
    deviation: float
    spread: float


@dataclass(frozen=True)
class Row:
    """One recipe.

    Attributes:
        loss: mean over the seeds.
        differences: its loss minus high precision's, by seed; zeros for the baseline.
        deviation: their sample standard deviation; None for one seed.
        relative: the mean difference over the band's mean.
        tokens_per_s, saved_bytes, peak_bytes: medians over the seeds; ratios are relative to the baseline.
        verdict: in words; '' for the baseline.
    """

    recipe: str
    loss: float
    differences: list[float]
    deviation: float | None
    relative: float
    tokens_per_s: float
    speed_ratio: float
    saved_bytes: int | None
    peak_bytes: int
    fp8_gemms: int
    hp_gemms: int
    skipped: int
    verdict: str


def read_outcome(run: PlannedRun) -> Outcome:
    """The result of a finished run.

    Raises:
        ValueError: an invalid value in its files; the message names the file and the line.
        StudyFailed: it has no finite loss.
    """
    record = RunRecord(run.folder)
    metrics = record.metrics()
    validations = [line.content for line in record.validation()]
    validates = bool(run.config.train.eval_iters)
    if not metrics or (validates and not validations):
        raise ValueError(f"{run.folder} is not a finished run's folder: remove it, and compare again.")
    losses = [_finite(line.content["lm_loss"]) for line in metrics]
    last = (
        [_finite(validations[-1]["validation_loss"])] if validates else losses[-max(1, len(losses) // 10) :]
    )
    known = [value for value in last if value is not None]
    if len(known) < len(last):
        raise StudyFailed(f"{run.name} ended without a finite loss: see megatron-fp8 report {run.folder}")
    speeds = [_figure(line, "tokens_per_s", above=True) for line in metrics]
    return Outcome(
        recipe=run.recipe,
        seed=run.seed,
        folder=str(run.folder),
        loss=statistics.fmean(known),
        losses=losses,
        tokens_per_s=statistics.median(speeds[1:] or speeds),
        saved_bytes=record.report().get("saved_bytes"),
        peak_bytes=max(int(_figure(line, "peak_memory")) for line in metrics),
        fp8_gemms=int(_figure(metrics[-1], "fp8_gemms")),
        hp_gemms=int(_figure(metrics[-1], "hp_gemms")),
        skipped=sum(int(_figure(line, "skipped")) for line in metrics),
    )


def _figure(line: Line, name: str, *, above: bool = False) -> float:
    """A value of a line, finite and at least 0, or ``above`` it. Raises ValueError otherwise."""
    value = line.content.get(name)
    if value is None or not 0 <= value < math.inf or (above and not value):
        raise line.wrong(f"has {name} {value!r}, and that is a number {'above 0' if above else 'from 0 on'}")
    return float(value)


def _finite(value: float | None) -> float | None:
    """The value; None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def band_of(outcomes: Sequence[Outcome]) -> Band:
    """The noise between seeds in high precision."""
    losses = [outcome.loss for outcome in outcomes if outcome.recipe == BASELINE]
    deviation = statistics.stdev(losses) if len(losses) > 1 else 0.0
    return Band(len(losses), statistics.fmean(losses), deviation, max(losses) - min(losses))


def rows_of(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row per recipe, the baseline first."""
    band = band_of(outcomes)
    baseline = {outcome.seed: outcome for outcome in outcomes if outcome.recipe == BASELINE}
    speed = statistics.median(outcome.tokens_per_s for outcome in baseline.values())
    rows = []
    for name in dict.fromkeys(outcome.recipe for outcome in outcomes):
        of_recipe = [outcome for outcome in outcomes if outcome.recipe == name]
        differences = [outcome.loss - baseline[outcome.seed].loss for outcome in of_recipe]
        mean = statistics.fmean(differences)
        saved = [outcome.saved_bytes for outcome in of_recipe if outcome.saved_bytes is not None]
        tokens = statistics.median(outcome.tokens_per_s for outcome in of_recipe)
        rows.append(
            Row(
                recipe=name,
                loss=statistics.fmean(outcome.loss for outcome in of_recipe),
                differences=differences,
                deviation=statistics.stdev(differences) if len(differences) > 1 else None,
                relative=mean / band.mean,
                tokens_per_s=tokens,
                speed_ratio=tokens / speed,
                saved_bytes=round(statistics.median(saved)) if saved else None,
                peak_bytes=round(statistics.median(outcome.peak_bytes for outcome in of_recipe)),
                fp8_gemms=of_recipe[-1].fp8_gemms,
                hp_gemms=of_recipe[-1].hp_gemms,
                skipped=sum(outcome.skipped for outcome in of_recipe),
                verdict="" if name == BASELINE else verdict(name, differences, of_recipe[-1].fp8_gemms, band),
            )
        )
    return rows


def verdict(name: str, differences: Sequence[float], fp8_gemms: int, band: Band) -> str:
    """The differences from high precision (loss, by seed) in words.

    Chance is measured by the band's spread: high precision's largest loss minus its smallest.
    """
    if not fp8_gemms:
        return f"{name} ran no GEMM in FP8: it shows nothing about FP8."
    if not any(differences):
        return f"{name} equals {BASELINE} to the last bit: these losses were computed before FP8 began."
    mean = statistics.fmean(differences)
    by = f"{mean:+.4f} nats ({mean / band.mean:+.2%})"
    if band.seeds < 2:
        return f"{name} ends {by} from {BASELINE}. With one seed that may be chance: give more --seeds."
    own = f"{BASELINE}'s own {band.seeds} seeds lie {band.spread:.4f} apart"
    range_ = f"{by} on average, {min(differences):+.4f} to {max(differences):+.4f} by seed; {own}."
    same_sign = all(d > 0 for d in differences) or all(d < 0 for d in differences)
    which = "worse" if mean > 0 else "better"
    sizes = [abs(d) for d in differences]
    if max(sizes) <= band.spread:
        more = f" It is {which} with every seed." if same_sign else ""
        near = f"no further from {BASELINE} than {BASELINE}'s seeds are from each other"
        return f"{name} is {near}: {range_}{more}"
    if same_sign and min(sizes) > band.spread:
        return f"{name} is {which} than {BASELINE} with every seed: {range_}"
    return f"{name} is undecided: {range_} More --seeds may tell."


def conclusion(rows: Sequence[Row], band: Band, device: str) -> str:
    """The verdicts, and caveats on the speeds."""
    lines = [row.verdict for row in rows if row.verdict]
    if 1 < band.seeds < 4:
        lines.append(f"{band.seeds} seeds give a rough idea of what chance does, no more.")
    if device.startswith("CPU"):
        lines.append("FP8 is emulated on a CPU: these speeds say nothing about a GPU.")
    return "\n".join(lines)


def document(comparison: Comparison, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """compare.json. Its keys keep their names and meaning; new ones may be added.

    ``recipes`` has the fields of Row, ``runs`` those of Outcome, ``band`` those of Band.
    """
    report = RunRecord(comparison.runs[0].folder).report()
    rows, band = rows_of(outcomes), band_of(outcomes)
    return {
        "format": FORMAT,
        "config": comparison.config,
        "overrides": list(comparison.overrides),
        "ranks": comparison.ranks,
        "iterations": comparison.runs[0].iterations,
        "seeds": list(comparison.seeds),
        "device": report["device"],
        "versions": report["versions"],
        "loss": "validation" if comparison.runs[0].config.train.eval_iters else "training",
        "bigram_entropy": report.get("bigram_entropy"),
        "band": asdict(band),
        "recipes": [asdict(row) for row in rows],
        "runs": [asdict(outcome) for outcome in outcomes],
        "verdict": conclusion(rows, band, report["device"]),
    }


_SMOOTH = 15  # moving average of plotted losses, in iterations; at most a tenth of the run

_NOISY = 1.1  # fastest seed over slowest


def as_table(content: dict[str, Any]) -> str:
    """Two Markdown tables with one line per recipe, for losses and for costs: one table would not fit a terminal."""
    losses = [("run", "loss", f"from {BASELINE}", "±")]
    costs = [("run", "tokens/s", f"x {BASELINE}", "saved MiB", "peak MiB", "FP8 GEMMs", "others")]
    for row in content["recipes"]:
        is_baseline = row["recipe"] == BASELINE
        mean = sum(row["differences"]) / len(row["differences"])
        deviation = content["band"]["deviation"] if is_baseline else row["deviation"]
        known = deviation is not None and content["band"]["seeds"] > 1
        losses.append(
            (
                row["recipe"],
                f"{row['loss']:.4f}",
                "" if is_baseline else f"{mean:+.4f} ({row['relative']:+.2%})",
                f"{deviation:.4f}" if known else "",
            )
        )
        costs.append(
            (
                row["recipe"],
                f"{row['tokens_per_s']:,.0f}{' (noisy)' if is_noisy(content, row['recipe']) else ''}",
                f"{row['speed_ratio']:.2f}",
                "" if row["saved_bytes"] is None else f"{row['saved_bytes'] / 2**20:,.1f}",
                f"{row['peak_bytes'] / 2**20:,.0f}",
                str(row["fp8_gemms"]),
                str(row["hp_gemms"]),
            )
        )
    return "\n\n".join(table(rows[0], rows[1:]) for rows in (losses, costs))


def is_noisy(content: dict[str, Any], recipe: str) -> bool:
    """Whether a recipe's speeds differ between seeds by more than a tenth, so that their median is imprecise."""
    speeds = [run["tokens_per_s"] for run in content["runs"] if run["recipe"] == recipe]
    return bool(speeds) and max(speeds) > _NOISY * min(speeds)


def as_markdown(content: dict[str, Any]) -> str:
    """compare.md: the setup, the tables with explanations, the verdict, the picture."""
    seeds = ", ".join(map(str, content["seeds"]))
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    ranks = "1 rank" if content["ranks"] == 1 else f"{content['ranks']} ranks"
    options = f" with `{' '.join(content['overrides'])}`" if content["overrides"] else ""
    kind = "validation" if content["loss"] == "validation" else "training (mean of the last tenth)"
    entropy = content["bigram_entropy"]
    more = "A model that has learned more than pairs of tokens is below"
    learned = f" {more} {entropy:.4f}, the data's bigram entropy." if entropy else ""
    return f"""# FP8 recipes against {BASELINE}

`{content["config"]}`{options}: {content["iterations"]} iterations on {ranks}, seeds {seeds}.
{content["device"]}; {versions}.

{as_table(content)}

{content["verdict"]}

Loss: {kind}, nats a token, the mean over seeds.{learned} "From bf16" is the mean of the differences seed by seed, "±"
their standard deviation; in the row of {BASELINE} it is that of its own losses over the seeds. Tokens/s: the median of a
run's iterations but the first, then of the seeds; noisy where the fastest seed is more than 10 % above the slowest.
Saved: what a micro-batch keeps for its backward on the first rank. Peak: the largest memory of that rank.
GEMMs: of linear layers, in one iteration on that rank.

![training loss by iteration](compare.png)

Both panels show training losses; a line is the mean over seeds, its shade goes from the smallest seed to the largest. The
grey band on the right is of the {kind} losses at the end.
"""


def draw(content: dict[str, Any], path: Path) -> None:
    """Two panels with the same colours: training losses, and differences from the baseline of the same seed.

    A line is the mean over seeds, the shade the range over seeds. The grey band on the right is the
    verdict's, from the final losses.
    """
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    length = min(len(run["losses"]) for run in content["runs"])
    window = max(1, min(_SMOOTH, length // 10))
    kernel = np.ones(window) / window
    steps = np.arange(window, length + 1)
    curves: dict[str, Any] = {}
    for run in content["runs"]:
        values = np.array([np.nan if x is None else x for x in run["losses"][:length]], dtype=float)
        curves.setdefault(run["recipe"], []).append(np.convolve(values, kernel, mode="valid"))
    bf16 = np.stack(curves[BASELINE])  # [seeds, iterations]
    for name, several in curves.items():
        losses = np.stack(several)
        _line(left, steps, losses, name)
        if name != BASELINE:
            _line(right, steps, 100 * (losses / bf16 - 1), name)
    if len(bf16) > 1:
        half = band_percent(content)
        shade = {"color": recipe_colour(BASELINE), "alpha": 0.15, "lw": 0}
        label = f"how far {content['loss']} losses of {BASELINE}'s seeds lie apart at the end: {half:.2g} %"
        right.axhspan(-half, half, label=label, **shade)
    right.axhline(0, color=recipe_colour(BASELINE), lw=0.8)
    if content["bigram_entropy"]:
        left.axhline(content["bigram_entropy"], color="#999999", ls=":", label="bigram entropy")
    smoothed = f", mean of {window}" if window > 1 else ""
    left.set(xlabel="iteration", ylabel=f"training loss (nats a token{smoothed})")
    right.set(xlabel="iteration", ylabel=f"training loss, from {BASELINE} of the same seed (%)")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        title = "shade: smallest to largest seed" if len(bf16) > 1 else None
        axes.legend(fontsize=8, title=title, title_fontsize=8)
    figure.savefig(path, dpi=110)


def band_percent(content: dict[str, Any]) -> float:
    """Half the height of the grey band: the largest difference that counts as within it, in % of the loss."""
    return 100 * content["band"]["spread"] / content["band"]["mean"]


def _line(axes: Any, steps: Any, values: Any, name: str) -> None:
    axes.plot(steps, values.mean(0), color=recipe_colour(name), lw=1.3, label=name)
    if len(values) > 1:
        axes.fill_between(steps, values.min(0), values.max(0), color=recipe_colour(name), alpha=0.15, lw=0)

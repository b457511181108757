"""Formats a comparison (compare.json) as Markdown and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...plan.timing import table
from ..colours import RECIPES
from .plan import BASELINE

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
    learned = (
        f" A model that has learned more than pairs of tokens is below {entropy:.4f}, the data's bigram entropy."
        if entropy
        else ""
    )
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
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.4), layout="constrained")
    length = min(len(run["losses"]) for run in content["runs"])
    window = max(1, min(_SMOOTH, length // 10))
    kernel = np.ones(window) / window
    steps = np.arange(window, length + 1)
    curves: dict[str, Any] = {}
    for run in content["runs"]:
        values = np.array([np.nan if x is None else x for x in run["losses"][:length]], dtype=float)
        curves.setdefault(run["recipe"], []).append(np.convolve(values, kernel, mode="valid"))
    bf16, largest = np.stack(curves[BASELINE]), 0.0  # [seeds, iterations]
    for name, several in curves.items():
        losses = np.stack(several)
        _line(left, steps, losses, name)
        if name != BASELINE:
            differences = 100 * (losses / bf16 - 1)
            largest = max(largest, np.nanmax(np.abs(differences), initial=0.0))
            _line(right, steps, differences, name)
    if len(bf16) > 1:
        half = band_percent(content)
        shade = {"color": RECIPES[BASELINE], "alpha": 0.15, "lw": 0}
        label = f"how far {content['loss']} losses of {BASELINE}'s seeds lie apart at the end: {half:.2g} %"
        right.axhspan(-half, half, label=label, **shade)
        if limit := reach(half, largest):
            right.set_ylim(-limit, limit)
    right.axhline(0, color=RECIPES[BASELINE], lw=0.8)
    if content["bigram_entropy"]:
        left.axhline(content["bigram_entropy"], color="#999999", ls=":", label="bigram entropy")
    smoothed = f", mean of {window}" if window > 1 else ""
    left.set(xlabel="iteration", ylabel=f"training loss (nats a token{smoothed})")
    right.set(xlabel="iteration", ylabel=f"training loss, from {BASELINE} of the same seed (%)")
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        title = "shade: smallest to largest seed" if len(bf16) > 1 else None
        axes.legend(fontsize=8, title=title, title_fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def reach(half: float, largest: float) -> float | None:
    """Limit of the right panel (%) if a band of +-``half`` would flatten lines up to ``largest``; else None."""
    return 4 * largest if 0 < 4 * largest < half else None


def band_percent(content: dict[str, Any]) -> float:
    """Half the height of the grey band: the largest difference that counts as within it, in % of the loss."""
    return 100 * content["band"]["spread"] / content["band"]["mean"]


def _line(axes: Any, steps: Any, values: Any, name: str) -> None:
    axes.plot(steps, values.mean(0), color=RECIPES[name], lw=1.3, label=name)
    if len(values) > 1:
        axes.fill_between(steps, values.min(0), values.max(0), color=RECIPES[name], alpha=0.15, lw=0)

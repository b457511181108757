"""Pictures of formats and scaling, on a terminal and as PNG; their colours.

Formats and recipes have the same colours in every picture: eight colours that people with any kind of colour
vision can distinguish (Okabe and Ito 2008); high precision is grey or black.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..files.atomic_io import as_value_error
from . import scaling_errors
from .format_tables import all_formats, intervals

FORMATS = {
    "e4m3": "#0072b2",
    "e5m2": "#d55e00",
    "e2m1": "#cc79a7",
    "e8m0": "#009e73",
    "bf16": "#404040",
    "fp16": "#999999",
}

RECIPE_COLOURS = {
    "bf16": "#404040",
    "delayed": "#e69f00",
    "tensorwise": "#d55e00",
    "rowwise": "#cc79a7",
    "blockwise": "#0072b2",
    "mxfp8": "#009e73",
    "nvfp4": "#f0e442",
    "custom": "#56b4e9",
}
"""'bf16' stands for the model's dtype without FP8."""

_FIRST, _LAST = -30, 32  # powers of two to draw: all of E5M2 and FP16
_HISTORIES = {1: ":", 16: "-", 1024: "--"}  # line styles


def recipe_colour(name: str) -> str:
    """Colour of a recipe; of one without an entry a colour of matplotlib's cycle."""
    return RECIPE_COLOURS.get(name, f"C{sum(name.encode()) % 10}")


def terminal() -> str:
    """One bar per format, one character per power of two, at most 80 columns: '=' for normal values, '.' for
    subnormal."""
    lines = ["Where each format has values ('=' normal, '.' subnormal, '<' '>': it goes on)", ""]
    for fmt in all_formats():
        cells = []
        for exponent in range(_FIRST, _LAST + 1):
            inside = 2.0 ** (exponent + 1) > fmt.smallest and 2.0**exponent <= fmt.max
            cells.append(" " if not inside else "=" if 2.0**exponent >= fmt.smallest_normal else ".")
        goes_on = math.log2(fmt.smallest) < _FIRST, math.log2(fmt.max) >= _LAST + 1
        bar = "<" * goes_on[0] + "".join(cells)[goes_on[0] : len(cells) - goes_on[1]] + ">" * goes_on[1]
        lines.append(f"  {fmt.name:<5} {bar}".rstrip())
    marks = [" "] * (_LAST - _FIRST + 9)
    for exponent in range(-24, _LAST + 1, 8):
        text = f"2^{exponent}" if exponent else "1"
        at = exponent - _FIRST
        marks[at : at + len(text)] = text
    lines.append(" " * 8 + "".join(marks).rstrip())
    return "\n".join(lines)


def draw(path: Path) -> None:
    """Four panels: range, relative error, recipes on outliers, delayed scaling. Raises ValueError: the file cannot be
    written."""
    if path.suffix != ".png":
        raise ValueError(f"--png={path} must be a FILE.png")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.6), layout="constrained")
    axes = figure.subplots(2, 2)
    _ranges(axes[0][0])
    _errors(axes[0][1])
    _recipes(axes[1][0])
    _delays(axes[1][1])
    with as_value_error(f"--png={path} cannot be written", ": give another file"):
        figure.savefig(path, dpi=110)


def _ranges(axes: Any) -> None:
    formats = all_formats()
    for place, fmt in enumerate(formats):
        low, normal, high = (math.log2(v) for v in (fmt.smallest, fmt.smallest_normal, fmt.max))
        axes.barh(place, high - normal, left=normal, color=FORMATS[fmt.name], height=0.5)
        axes.barh(place, normal - low, left=low, color=FORMATS[fmt.name], alpha=0.35, height=0.5)
        axes.text(high + 2, place, f"{high - low:.0f} powers of two", va="center", fontsize=8)
    axes.set_yticks(range(len(formats)), [f"{fmt.name}\n{fmt.use}" for fmt in formats], fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="#bbbbbb", lw=0.8, zorder=0)
    axes.set(
        xlim=(-155, 215), xlabel="binary logarithm of the value", title="Dynamic range (pale: subnormal)"
    )


def _errors(axes: Any) -> None:
    for fmt in (f for f in all_formats() if f.rounded is not None):
        found = [
            i for i in intervals(fmt) if i.worst_relative_error is not None and _FIRST <= i.exponent <= 20
        ]
        edges = [i.exponent for i in found]
        heights = [min(i.worst_relative_error or 0.0, 4.0) for i in found]
        axes.step(
            [*edges, edges[-1] + 1],
            [*heights, heights[-1]],
            where="post",
            color=FORMATS[fmt.name],
            label=fmt.name,
        )
    axes.set_yscale("log", base=2)
    axes.axhline(1, color="#bbbbbb", lw=0.8, zorder=0)
    axes.set(
        xlim=(_FIRST, 20),
        ylim=(2**-12, 2),
        xlabel="binary logarithm of the value",
        title="Largest relative error of rounding, unscaled (1: all is lost)",
    )
    axes.legend(fontsize=8, ncols=5, loc="lower center")


def _recipes(axes: Any) -> None:
    lines: dict[tuple[str, str], list[scaling_errors.RecipeResult]] = {}
    for q in scaling_errors.recipe_results():
        lines.setdefault((q.recipe, q.rule), []).append(q)
    for (name, rule), found in lines.items():
        dashed = "--" if rule.split()[1] in ("128x128", "16x16") else "-"
        axes.plot(
            range(len(found)),
            [q.ordinary_sqnr_db for q in found],
            dashed,
            marker="o",
            ms=4,
            color=recipe_colour(name),
            label=f"{name} ({rule})",
        )
    axes.set_xticks(
        range(len(scaling_errors.SIZES)), ["none", *(f"{size:,}" for size in scaling_errors.SIZES[1:])]
    )
    count = scaling_errors.ROWS * scaling_errors.COLS
    axes.set(
        xlabel=f"size of {scaling_errors.OUTLIERS} outliers among {count:,}, in standard deviations",
        ylabel="SQNR of the other elements (dB)",
        title="One tensor, every scaling",
    )
    axes.legend(fontsize=8, loc="lower left")


def _delays(axes: Any) -> None:
    """SQNR by iteration for jumping magnitudes; line styles show the history length."""
    shown = {"tensorwise (no delay)": (RECIPE_COLOURS["tensorwise"], "-")}
    shown |= {
        f"history {length}, margin 0": (RECIPE_COLOURS["delayed"], style)
        for length, style in _HISTORIES.items()
    }
    for name, (colour, style) in shown.items():
        steps = scaling_errors.all_simulations()["spiky", name]
        x, y = [s.iteration for s in steps], [s.sqnr for s in steps]
        axes.plot(x, y, style, color=colour, lw=1.6, label=name)
    for spike in (i for i, size in enumerate(scaling_errors.MAGNITUDES["spiky"]) if size > 1):
        axes.axvline(spike, color="#dddddd", lw=5, zorder=0)
    axes.set(
        xlabel="iteration (grey bar: a tensor 65,536 times as large)",
        ylabel="SQNR (dB)",
        title="Delayed scaling: a jump saturates, then is remembered",
        ylim=(-2, 48),
    )
    axes.legend(fontsize=8, loc="upper right", ncols=2)

"""Tables of `megatron-fp8 formats`, as CSV and for 80 columns."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..plan.timing import table
from . import scaling_errors
from .format_values import Described, Interval, all_formats, by_magnitude

Rows = list[dict[str, Any]]


def formats() -> Rows:
    """One row per format: counts of codes, limits, dynamic range in powers of two, largest error of normal values."""
    rows = []
    for fmt in all_formats():
        normal = [i for i in by_magnitude(fmt) if i.values and 2.0**i.exponent >= fmt.smallest_normal]
        errors = [i.worst_relative_error for i in normal if i.worst_relative_error is not None]
        rows.append(
            {
                "format": fmt.name,
                "bits": fmt.bits,
                "use": fmt.use,
                "mantissa_bits": fmt.mantissa_bits,
                "finite_codes": int(fmt.values.isfinite().sum()),
                "inf_codes": int(fmt.values.isinf().sum()),
                "nan_codes": int(fmt.values.isnan().sum()),
                "max": fmt.max,
                "smallest_normal": fmt.smallest_normal,
                "smallest": fmt.smallest,
                "binades": math.log2(fmt.max / fmt.smallest_normal),
                "binades_with_subnormals": math.log2(fmt.max) - math.log2(fmt.smallest),
                "largest_relative_error": max(errors, default=None),
            }
        )
    return rows


def values() -> Rows:
    """One row per code: its value, and the distance to the next larger magnitude (empty for the largest, NaN and
    Inf)."""
    rows = []
    for fmt in all_formats():
        positive = [0.0, *fmt.positive.tolist()] if bool((fmt.values == 0).any()) else fmt.positive.tolist()
        after = dict(pairwise(positive))
        digits = -(-fmt.bits // 4)
        for code, value in enumerate(fmt.values.tolist()):
            size = abs(value)
            gap = after[size] - size if size in after else None
            rows.append({"format": fmt.name, "code": f"0x{code:0{digits}x}", "value": value, "spacing": gap})
    return rows


def magnitudes() -> Rows:
    """One row per format and power of two."""
    return [{"format": one.name, **vars(interval)} for one in all_formats() for interval in by_magnitude(one)]


def recipes() -> Rows:
    """One row per recipe, operand and size of outliers."""
    return [vars(quantized) for quantized in scaling_errors.by_recipe()]


def delays() -> Rows:
    """One row per iteration of each simulation."""
    return [
        {"magnitudes": kind, "setting": name, **vars(step)}
        for (kind, name), steps in scaling_errors.all_simulations().items()
        for step in steps
    ]


def as_csv(rows: Rows) -> str:
    """The rows under one header; None is an empty field, NaN and Inf are nan and inf."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# Text tables of at most 80 columns.


def power(value: float | None) -> str:
    """'2^-3' for a power of two, otherwise the number; '' for None."""
    if value is None:
        return ""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"


def show_formats() -> str:
    """Properties of the formats, one column each."""
    rows = formats()
    facts: dict[str, Callable[[dict[str, Any]], str]] = {
        "bits": lambda r: str(r["bits"]),
        "mantissa bits": lambda r: str(r["mantissa_bits"]),
        "codes: numbers": lambda r: str(r["finite_codes"]),
        "codes: NaN": lambda r: str(r["nan_codes"]),
        "codes: Inf": lambda r: str(r["inf_codes"]),
        "largest": lambda r: power(r["max"]) if r["format"] == "e8m0" else f"{r['max']:.5g}",
        "smallest normal": lambda r: power(r["smallest_normal"]),
        "smallest": lambda r: power(r["smallest"]),
        "powers of two": lambda r: f"{r['binades']:.1f}",
        "with subnormals": lambda r: f"{r['binades_with_subnormals']:.1f}",
        "largest error": lambda r: (
            "" if r["largest_relative_error"] is None else f"{r['largest_relative_error']:.2%}"
        ),
    }
    cells = [(name, *(say(row) for row in rows)) for name, say in facts.items()]
    return table(("", *(row["format"] for row in rows)), cells)


def show_values() -> str:
    """Every positive value of the small formats, one line per power of two."""
    lines = []
    for fmt in all_formats():
        if fmt.bits == 16 or not fmt.mantissa_bits:
            what = f"{len(fmt.positive):,} positive values from {power(fmt.smallest)} to {power(fmt.max)}"
            lines.append(f"{fmt.name}: {what}; --csv FILE lists them")
            continue
        sign = "and their negatives, 0 and -0" if bool((fmt.values < 0).any()) else ""
        lines.append(f"{fmt.name}: {len(fmt.positive)} positive values, {sign}")
        exponents = torch.frexp(fmt.positive)[1] - 1
        for exponent in exponents.unique().tolist():
            inside = fmt.positive[exponents == exponent].tolist()
            lines.append(f"  2^{exponent:<4}" + "".join(f"{exactly(value):>9}" for value in inside))
    return "\n".join(lines)


def exactly(value: float) -> str:
    """A value without rounding: as a decimal number, or as a fraction if that is long."""
    text = f"{value:g}"
    return text if len(text) <= 6 and float(text) == value else str(Fraction(value))


def show_magnitudes() -> str:
    """Spacing and largest relative error of each element format, from large to small."""
    shown = [fmt for fmt in all_formats() if fmt.rounded is not None]
    by_name = {fmt.name: {i.exponent: i for i in by_magnitude(fmt)} for fmt in shown}
    small = [i for fmt in shown if fmt.bits <= 8 for i in by_name[fmt.name]]
    rows = []
    for exponent in range(max(small), min(small) - 1, -1):
        cells = [f"2^{exponent}"]
        for fmt in shown:
            cells.append(_cell(fmt, exponent, by_name[fmt.name].get(exponent)))
        rows.append(tuple(cells))
    return table(("from", *(f"{fmt.name}" for fmt in shown)), rows)


def _cell(one: Described, exponent: int, interval: Interval | None) -> str:
    """Spacing and error, or the effect on values outside the format."""
    if 2.0**exponent > one.max:
        return "Inf" if one.bits == 16 else "saturates"
    if interval is None or interval.worst_relative_error is None:
        return "0"
    return f"{power(interval.spacing)} {interval.worst_relative_error:.{2 if one.bits == 16 else 1}%}"


def show_recipes() -> str:
    """SQNR of ordinary elements by recipe and size of the outliers."""
    rows: dict[tuple[str, str], list[scaling_errors.Quantized]] = {}
    for q in scaling_errors.by_recipe():
        rows.setdefault((q.recipe, q.rule), []).append(q)
    cells = [
        (f"{name} {rule.split()[1]}", *(f"{q.ordinary_sqnr_db:.1f} {q.ordinary_flushed:3.0%}" for q in found))
        for (name, rule), found in rows.items()
    ]
    sizes = ("none" if size == 1 else f"{size:,}" for size in scaling_errors.SIZES)
    return table(("scale for each", *sizes), cells)


def show_delays() -> str:
    """The effect of each delayed-scaling setting on magnitudes that stay, grow or jump."""
    cells = []
    for (kind, name), steps in scaling_errors.all_simulations().items():
        ratios = [step.sqnr for step in steps]
        cells.append(
            (
                f"{kind}: {name}",
                str(sum(step.saturated > 0 for step in steps)),
                f"{max(step.saturated for step in steps):.2%}",
                f"{statistics.median(ratios):.1f}",
                f"{min(ratios):.1f}",
            )
        )
    return table(("magnitudes: setting", "saturated", "at most", "SQNR dB", "worst"), cells)


class Table(NamedTuple):
    """One table: its rows for CSV, and its text for a terminal."""

    rows: Callable[[], Rows]
    text: Callable[[], str]


TABLES = {
    "formats": Table(formats, show_formats),
    "values": Table(values, show_values),
    "magnitudes": Table(magnitudes, show_magnitudes),
    "recipes": Table(recipes, show_recipes),
    "delayed": Table(delays, show_delays),
}
"""The tables by name."""

"""Tables of `megatron-fp8 formats`, as CSV and for 80 columns.

Values of each format, their spacing, and the rounding error of values by magnitude are computed from `numerics.cast`.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..numerics import nvfp4
from ..numerics.cast import cast, decode
from ..numerics.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat
from ..numerics.scaling import e8m0_to_scale_inv
from ..plan.timing import table
from . import scaling_errors

Rows = list[dict[str, Any]]


def formats() -> Rows:
    """One row per format: counts of codes, limits, dynamic range in powers of two, largest error of normal values."""
    rows = []
    for fmt in all_formats():
        normal = [i for i in intervals(fmt) if i.values and 2.0**i.exponent >= fmt.smallest_normal]
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
    return [{"format": one.name, **vars(interval)} for one in all_formats() for interval in intervals(one)]


def recipes() -> Rows:
    """One row per recipe, operand and size of outliers."""
    return [vars(quantized) for quantized in scaling_errors.recipe_results()]


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
            lines.append(f"  2^{exponent:<4}" + "".join(f"{exact_text(value):>9}" for value in inside))
    return "\n".join(lines)


def exact_text(value: float) -> str:
    """A value without rounding: as a decimal number, or as a fraction if that is long."""
    text = f"{value:g}"
    return text if len(text) <= 6 and float(text) == value else str(Fraction(value))


def show_magnitudes() -> str:
    """Spacing and largest relative error of each element format, from large to small."""
    shown = [fmt for fmt in all_formats() if fmt.rounded is not None]
    by_name = {fmt.name: {i.exponent: i for i in intervals(fmt)} for fmt in shown}
    small = [i for fmt in shown if fmt.bits <= 8 for i in by_name[fmt.name]]
    rows = []
    for exponent in range(max(small), min(small) - 1, -1):
        cells = [f"2^{exponent}"]
        for fmt in shown:
            cells.append(_cell(fmt, exponent, by_name[fmt.name].get(exponent)))
        rows.append(tuple(cells))
    return table(("from", *(f"{fmt.name}" for fmt in shown)), rows)


def _cell(one: FormatProperties, exponent: int, interval: Interval | None) -> str:
    """Spacing and error, or the effect on values outside the format."""
    if 2.0**exponent > one.max:
        return "Inf" if one.bits == 16 else "saturates"
    if interval is None or interval.worst_relative_error is None:
        return "0"
    return f"{power(interval.spacing)} {interval.worst_relative_error:.{2 if one.bits == 16 else 1}%}"


def show_recipes() -> str:
    """SQNR of ordinary elements by recipe and size of the outliers."""
    rows: dict[tuple[str, str], list[scaling_errors.RecipeResult]] = {}
    for q in scaling_errors.recipe_results():
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


_GRID = 4096  # points per power of two: includes all values and midpoints for mantissas of up to 11 bits


@dataclass(frozen=True, eq=False)
class FormatProperties:
    """A format with its values and its rounding.

    Attributes:
        name, bits, use: 'e4m3', 8, and its purpose in a few words.
        values: float64 [2^bits], by code, including NaN and Inf.
        rounded: float64 of any shape -> the nearest values, as the package (or torch) rounds; None for a
            format of scales.
    """

    name: str
    bits: int
    use: str
    values: torch.Tensor
    rounded: Callable[[torch.Tensor], torch.Tensor] | None

    @cached_property
    def positive(self) -> torch.Tensor:
        """float64, ascending: the distinct finite values above zero."""
        return self.values[self.values.isfinite() & (self.values > 0)].unique()

    @cached_property
    def mantissa_bits(self) -> int:
        """Mantissa bits: 2^bits values lie in [1, 2)."""
        return round(math.log2(int(((self.positive >= 1) & (self.positive < 2)).sum())))

    @cached_property
    def max(self) -> float:
        """The largest finite value."""
        return float(self.positive[-1])

    @cached_property
    def smallest(self) -> float:
        """The smallest value above zero."""
        return float(self.positive[0])

    @cached_property
    def smallest_normal(self) -> float:
        """The smallest value with all mantissa bits; values below it are evenly spaced (subnormal)."""
        return float(self.positive[2**self.mantissa_bits - 1])


@dataclass(frozen=True)
class Interval:
    """A format in [2^exponent, 2^(exponent + 1)).

    Attributes:
        values: number of values in the interval.
        spacing: distance between them; None without values.
        worst_relative_error, rms_relative_error: of rounding, largest and root mean square; None for scales. 1
            means that everything below the smallest value becomes 0. Above the largest value FP8 saturates,
            BF16 and FP16 overflow (Inf); an interval that contains the largest value is counted up to it.
    """

    exponent: int
    values: int
    spacing: float | None
    worst_relative_error: float | None
    rms_relative_error: float | None


@cache
def all_formats() -> tuple[FormatProperties, ...]:
    """E4M3, E5M2, E8M0, BF16, FP16, E2M1."""
    return (
        _element(E4M3, "weights and activations"),
        _element(E5M2, "gradients (hybrid)"),
        _scale(E8M0, "scales of MX blocks"),
        _torch("bf16", torch.bfloat16, "what FP8 is compared with"),
        _torch("fp16", torch.float16, "needs a loss scale"),
        _e2m1(),
    )


@cache
def intervals(described: FormatProperties) -> list[Interval]:
    """Intervals from one power of two below the smallest value to one above the largest."""
    positive = described.positive
    first, last = _exponent(described.smallest) - 1, _exponent(described.max) + 1
    exponents = torch.frexp(positive)[1] - 1
    found = []
    for exponent in range(first, last + 1):
        inside = positive[exponents == exponent]
        spacing = None
        if len(inside):
            at = int((positive == inside[0]).nonzero()[0])
            spacing = float(positive[at + 1] - positive[at]) if at + 1 < len(positive) else None
        elif exponent == first and described.rounded is not None:
            spacing = described.smallest  # between 0 and the smallest value
        found.append(Interval(exponent, len(inside), spacing, *_errors(described, exponent)))
    return found


def _errors(described: FormatProperties, exponent: int) -> tuple[float | None, float | None]:
    if described.rounded is None:
        return None, None
    steps = torch.arange(_GRID, dtype=torch.float64, device="cpu") / _GRID
    x = torch.ldexp(1 + steps, torch.tensor(exponent, dtype=torch.int64, device="cpu"))
    # Only up to the format's largest value, and within float32, from which the package casts.
    x = x[x <= (described.max if x[0] <= described.max else torch.finfo(torch.float32).max)]
    if not len(x):
        return None, None
    relative = (described.rounded(x) - x).abs() / x
    return float(relative.max()), float(relative.square().mean().sqrt())


def _exponent(value: float) -> int:
    return math.frexp(value)[1] - 1


def _codes(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32, device="cpu")


def _element(fmt: FloatFormat, use: str) -> FormatProperties:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return decode(cast(x.to(torch.float32), None, fmt)).to(torch.float64)

    codes = _codes(256).to(torch.uint8).view(fmt.dtype)
    return FormatProperties(fmt.name, 8, use, decode(codes).to(torch.float64), rounded)


def _scale(fmt: FloatFormat, use: str) -> FormatProperties:
    return FormatProperties(
        fmt.name, 8, use, e8m0_to_scale_inv(_codes(256).to(torch.uint8)).to(torch.float64), None
    )


def _torch(name: str, dtype: torch.dtype, use: str) -> FormatProperties:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).to(dtype).to(torch.float64)

    values = _codes(65536).to(torch.int16).view(dtype).to(torch.float64)
    return FormatProperties(name, 16, use, values, rounded)


def _e2m1() -> FormatProperties:
    numbers = nvfp4.values(nvfp4.pack(_codes(16).to(torch.uint8)[None]), torch.float64)[0]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return numbers[nvfp4.encode(x.to(torch.float32)).to(torch.int64)]

    return FormatProperties(E2M1.name, 4, "nvfp4", numbers, rounded)

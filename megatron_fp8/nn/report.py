"""The report of a conversion, by module, as data and as a table.

Training updates it: see linear_usage_check.py.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

COLUMNS = ("module", "type", "shape", "runs", "why")
_WIDTH, _WIDEST = 100, 24
"""Most characters of a line of the table, and of a column except the first."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
"""A numeric part of a module's name."""


@dataclass(frozen=True)
class Row:
    """One module of the model.

    Attributes:
        name: its name in the model.
        kind: its class before the conversion.
        shape: shape of its weight; (out features, in features) for a linear.
        converted: whether it was converted to FP8.
        runs: recipe and backend, or the dtype it stays in.
        reason: why.
        weights: number of values of its own parameters. A shared parameter counts in one module only.
        multiplied: number of these that each token is multiplied by: matrices of linears, RNNs and unknown
            modules.
        lazy: it has parameters without a shape yet, which are not counted.
        planned: it is a linear with a plan, so overrides by name apply.
        linear: it is a linear, or a stack of matrices.
        in_use: False for a converted module that did not run in FP8 in the first iterations, or was replaced
            since.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    converted: bool
    runs: str
    reason: str
    weights: int = 0
    multiplied: int = 0
    lazy: bool = False
    in_use: bool = True
    planned: bool = False
    linear: bool = True


@dataclass(frozen=True, repr=False)
class Fp8Report:
    """All modules with their own parameters. ``str()`` gives a table of at most 100 columns: similar layers
    share a line, and reasons are listed once below.

    Attributes:
        keep_columnwise: the config's.
    """

    rows: tuple[Row, ...]
    keep_columnwise: bool = True

    def __repr__(self) -> str:
        running = len(self.converted) - len(self.not_in_use)
        return f"Fp8Report({running} of {len(self.rows)} modules run in FP8; print it for the table)"

    @property
    def converted(self) -> list[str]:
        """Names of the converted modules."""
        return [row.name for row in self.rows if row.converted]

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason, for modules that were not converted."""
        return {row.name: row.reason for row in self.rows if not row.converted}

    @property
    def not_in_use(self) -> dict[str, str]:
        """Name -> reason, for converted modules that do not run in FP8."""
        return {row.name: row.reason for row in self.rows if row.converted and not row.in_use}

    @property
    def weights_in_fp8(self) -> float:
        """Share of all parameter values that are in FP8 layers' weights, from 0 to 1."""
        return self._share("weights")

    @property
    def flops_in_fp8(self) -> float:
        """Share of multiplications by weights that are in FP8, assuming one token per matrix.

        All experts count. Convolutions and products of two activations, as in attention, do not.
        """
        return self._share("multiplied")

    def with_rows(self, rows: Iterable[Row]) -> Fp8Report:
        """A report with these rows instead of those of the same names."""
        new = {row.name: row for row in rows}
        return replace(self, rows=tuple(new.get(row.name, row) for row in self.rows))

    def without(self, names: Iterable[str], runs: str, reason: str) -> Fp8Report:
        """A report with these converted modules marked as not running in FP8."""
        marked = set(names)
        return replace(
            self,
            rows=tuple(
                replace(row, runs=runs, reason=reason, in_use=False)
                if row.converted and row.name in marked
                else row
                for row in self.rows
            ),
        )

    def as_dict(self) -> list[dict[str, Any]]:
        """Plain values, for JSON."""
        return [{**vars(row), "shape": list(row.shape)} for row in self.rows]

    def __str__(self) -> str:
        grouped: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            shape = " x ".join(map(str, row.shape))
            pattern = _NUMBER.sub("#", row.name)
            grouped.setdefault((pattern, row.kind, shape, row.runs, row.reason), []).append(row.name)
        reasons = {key[-1]: "" for key in grouped if key[-1]}
        reasons = {reason: str(number) for number, reason in enumerate(reasons, start=1)}
        lines = [(_name(names), *key[1:-1], reasons.get(key[-1], "")) for key, names in grouped.items()]
        notes = [_wrap(f"{number:>2}  {reason}", "    ") for reason, number in reasons.items()]
        requantize_note = "keep_columnwise=False: each backward recomputes the weights' codes for dgrad"
        parts = [*_table([COLUMNS, *lines]), *notes, _wrap(self._summary())]
        return "\n".join([*parts, *([] if self.keep_columnwise else [requantize_note])])

    def _summary(self) -> str:
        running = sum(row.converted and row.in_use for row in self.rows)
        return (
            f"{running} of {len(self.rows)} modules with parameters run in FP8: {_percent(self.weights_in_fp8)} of the"
            f" weights, {_percent(self.flops_in_fp8)} of the linears' FLOPs assuming one token per matrix"
            + (", not counting what has no shape yet" if any(row.lazy for row in self.rows) else "")
        )

    def _share(self, field: str) -> float:
        total = sum(getattr(row, field) for row in self.rows)
        part = sum(getattr(row, field) for row in self.rows if row.converted and row.in_use)
        return part / total if total else 0.0


def keep_report(model: Any, report: Fp8Report | None) -> None:
    """Store the report as ``model.fp8_report``; None removes it."""
    if report is not None:
        model.fp8_report = report
    elif "fp8_report" in vars(model):
        del model.fp8_report


def report_of(model: Any) -> Fp8Report | None:
    """``model.fp8_report``; None if there is no model or no report."""
    return getattr(model, "fp8_report", None)


def _percent(share: float) -> str:
    """'42 %'. '100 %' means all and '0 %' nothing; values close to them give '> 99 %' or '< 1 %'."""
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{share:.0%}".replace("%", " %")


def _name(names: Sequence[str]) -> str:
    """One name unchanged; 'layers.0-31.fc1 (32)' for a range without gaps; else the first and the last."""
    names = [name or "(the model)" for name in names]
    if len(names) == 1:
        return names[0]
    numbers = [[int(number) for number in _NUMBER.findall(name)] for name in names]
    differing = [i for i, column in enumerate(zip(*numbers, strict=True)) if len(set(column)) > 1]
    if len(differing) == 1:
        place = differing[0]
        column = [each[place] for each in numbers]
        if column == list(range(column[0], column[-1] + 1)):
            parts = iter(range(len(numbers[0])))
            span = f"{column[0]}-{column[-1]}"
            name = _NUMBER.sub(lambda found: span if next(parts) == place else found[0], names[0])
            return f"{name} ({len(names)})"
    return f"{names[0]} .. {names[-1]} ({len(names)})"


def _table(lines: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines of a table. The first column gets the width that the others leave; long cells wrap."""
    widths = [0, *(min(max(map(len, column)), _WIDEST) for column in [*zip(*lines, strict=True)][1:])]
    widths[0] = min(max(len(line[0]) for line in lines), _WIDTH - sum(widths) - 2 * (len(widths) - 1))
    for line in lines:
        cells = [_wrap_cell(cell, width) for cell, width in zip(line, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            yield "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()


def _wrap_cell(cell: str, width: int) -> list[str]:
    """Splits a cell into lines of at most ``width`` characters, preferably after spaces and dots."""
    lines = [""]
    for word in re.findall(rf"[^ .]{{1,{width - 1}}}[ .]?|[ .]", cell):
        if len((lines[-1] + word).rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines]


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)

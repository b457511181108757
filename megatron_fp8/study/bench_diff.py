"""Compares a benchmark with an earlier one: changes beyond the noise of both.

It compares ratios to BF16, which was timed alternately with FP8, so a generally slower machine does not
matter. The noise of a row is the sum of the relative interquartile ranges of both measurements; smaller
changes mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.atomic_io import read_ordinary
from ..files.manifest import LARGEST
from ..files.strict_json import load_json
from ..plan.timing import LEAST_FOR_SPREAD, table

VERDICTS = ("faster", "slower", "within noise", "too noisy to tell")
TOO_NOISY = 1.0
"""Above this noise even a cell twice as slow counts as unchanged, so the result is useless."""


@dataclass(frozen=True)
class Change:
    """One cell in both benchmarks: FP8's time over BF16's before and now, the relative change, and the noise."""

    cell: str
    before: float
    now: float
    noise: float

    @property
    def change(self) -> float:
        """Relative to BF16; -0.1 is a tenth faster."""
        return self.now / self.before - 1

    @property
    def verdict(self) -> str:
        """The change in words. A factor of two counts the same in both directions."""
        if self.noise >= TOO_NOISY:
            return "too noisy to tell"
        if max(self.now / self.before, self.before / self.now) - 1 <= self.noise:
            return "within noise"
        return "faster" if self.change < 0 else "slower"


def read(path: Path) -> dict[str, Any]:
    """An earlier result of `bench --out` or `--json`. Raises ValueError for any other file."""
    try:
        content = load_json(read_ordinary(path, LARGEST))
        rows = content["rows"]
        if any(row["spread"] is None for row in rows):
            raise ValueError(f"it has no spread, since it has fewer than {LEAST_FOR_SPREAD} repetitions")
        keys = {"section", "k", "n", "tokens", "contender", "ratio", "spread"}
        if not rows or not all(
            keys <= row.keys() and row["ratio"] > 0 and row["spread"] >= 0 for row in rows
        ):
            raise ValueError("its rows are not those of bench")
        str(content["device"])
        {_cell(row) for row in rows}  # checks that cell names are hashable
    except OSError as error:
        raise ValueError(
            f"--compare={path} cannot be read ({error.strerror}): give a file of bench --out"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--compare={path} is no result of bench ({error}): give a file of bench --out"
        ) from error
    return content


def check_comparable(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if the earlier result is from another device or number of threads."""
    for key in ("device", "threads"):
        if old.get(key) != new.get(key):
            raise ValueError(
                f"--compare={path} is of {key} {old.get(key)!r}, and here it is {new.get(key)!r}: they cannot be compared"
            )


def changes(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Changes of the cells in both, in the order of the new benchmark."""
    before = {_cell(row): row for row in old}
    return [
        Change(name, before[name]["ratio"], row["ratio"], before[name]["spread"] + row["spread"])
        for row in new
        if (name := _cell(row)) in before
    ]


def as_table(found: Sequence[Change]) -> str:
    """One line per cell, and a summary sentence."""
    if not found:
        return "No cell was measured in both."
    rows = [
        (c.cell, f"{c.before:.2f}", f"{c.now:.2f}", f"{c.change:+.0%}", f"{c.noise:.0%}", c.verdict)
        for c in found
    ]
    counts = {word: sum(c.verdict == word for c in found) for word in VERDICTS}
    summary = ", ".join(f"{count} {word}" for word, count in counts.items() if count or word != VERDICTS[-1])
    header = ("cell", "x BF16 then", "now", "change", "noise", "verdict")
    return f"{table(header, rows)}\nOf {len(found)} cells: {summary}."


def _cell(row: Mapping[str, Any]) -> str:
    return f"{row['section']} {row['k']} x {row['n']} x {row['tokens']} {row['contender']}"

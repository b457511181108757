"""What a conversion did, module by module, as data and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

COLUMNS = ("module", "type", "shape", "runs", "why")


@dataclass(frozen=True)
class Row:
    """One module of the model.

    Attributes:
        name: its name in the model.
        kind: its class, before the conversion.
        shape: of its weight: (out features, in features) for a linear.
        converted: whether it runs in FP8.
        runs: the recipe and the backend, or the dtype it stays in.
        reason: why.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    converted: bool
    runs: str
    reason: str


@dataclass(frozen=True)
class Fp8Report:
    """Every module that holds parameters of its own; ``str()`` is a table, with alike layers on one line."""

    rows: tuple[Row, ...]

    @property
    def converted(self) -> list[str]:
        """Names of the modules that run in FP8."""
        return [row.name for row in self.rows if row.converted]

    @property
    def skipped(self) -> dict[str, str]:
        """Name -> reason of the modules that do not."""
        return {row.name: row.reason for row in self.rows if not row.converted}

    def as_dict(self) -> list[dict[str, Any]]:
        """Plain values, for JSON."""
        return [{**vars(row), "shape": list(row.shape)} for row in self.rows]

    def __str__(self) -> str:
        grouped: dict[tuple[str, ...], list[str]] = {}
        for row in self.rows:
            shape = " x ".join(map(str, row.shape))
            numbers = re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "#", row.name)
            grouped.setdefault((numbers, row.kind, shape, row.runs, row.reason), []).append(row.name)
        lines = [(_name(names), *key[1:]) for key, names in grouped.items()]
        widths = [max(len(line[i]) for line in [COLUMNS, *lines]) for i in range(len(COLUMNS) - 1)]
        table = [_line(cells, widths) for cells in [COLUMNS, *lines]]
        linears = sum(row.converted for row in self.rows)
        return "\n".join([*table, f"{linears} of {len(self.rows)} modules with parameters run in FP8"])


def _name(names: Iterable[str]) -> str:
    """'layers.0.fc1', or 'layers.0.fc1 .. layers.31.fc1 (32)'."""
    names = [name or "(the model)" for name in names]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=False)]
    return "  ".join([*padded, cells[-1]]).rstrip()

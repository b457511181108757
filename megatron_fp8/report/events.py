"""Events of a run: skipped steps, starts, saves, actions of the guard.

events.jsonl has an object for each start from a checkpoint and for each save: {"iteration", "event", "text"}.
Skipped steps are in metrics.jsonl, the guard's actions in report.json. If a run recorded no saves, its
checkpoints count as saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.checkpoint import complete_checkpoints, iteration_of, not_finite_checkpoints
from ..files.jsonl import Line


@dataclass(frozen=True)
class Event:
    """An event in the iterations ``first`` to ``last``. ``kind``: one word; ``text``: a description."""

    first: int
    last: int
    kind: str
    text: str


def skipped_steps(lines: Iterable[Line]) -> list[Event]:
    """One event per range of consecutive skipped steps. Raises ValueError for an invalid line."""
    found: list[Event] = []
    counts: dict[int, float] = {}
    for line in lines:
        if "skipped" in line.content and line.number_of("skipped"):
            counts[line.iteration()] = line.number_of("nonfinite") or 0 if "nonfinite" in line.content else 0
        else:
            counts.pop(line.iteration(), None)
    stretches: list[list[int]] = []
    for iteration in sorted(counts):
        if stretches and stretches[-1][-1] == iteration - 1:
            stretches[-1].append(iteration)
        else:
            stretches.append([iteration])
    for stretch in stretches:
        values = sum(counts[i] for i in stretch)
        text = "step skipped" if len(stretch) == 1 else f"{len(stretch)} steps skipped"
        text += f"; FP8 casts met {values:,.0f} values that were NaN or infinite" if values else ""
        found.append(Event(stretch[0], stretch[-1], "skip", text))
    return found


def recorded(lines: Iterable[Line]) -> list[Event]:
    """The events of events.jsonl. Raises ValueError."""
    return [
        Event(line.iteration(), line.iteration(), line.text("event"), line.text("text")) for line in lines
    ]


def guard_moves(report: Mapping[str, Any], path: str) -> list[Event]:
    """Sites that the guard moved to another precision, from report.json (iterations from 0). Raises ValueError if
    invalid."""
    try:
        return [
            Event(
                move["iteration"] + 1,
                move["iteration"] + 1,
                "guard",
                f"{move['site']} to {move['to']}: {move['why']}",
            )
            for move in report.get("guard", ())
        ]
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{path!r} is no run's report: the guard's moves cannot be understood ({error!r})."
        ) from error


def seen_checkpoints(folder: Path) -> list[Event]:
    """A save event for each checkpoint in the folder; deleted checkpoints are unknown."""
    good = [(path, f"{path.name}, still there") for path in complete_checkpoints(folder)]
    bad = [
        (path, f"{path.name}: it holds NaN or Inf, and no training starts from it")
        for path in not_finite_checkpoints(folder)
    ]
    found = [(iteration_of(path), text) for path, text in (*good, *bad)]
    return [Event(iteration, iteration, "save", text) for iteration, text in found]

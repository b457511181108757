"""A run, read from its folder. One of RUN_FILES suffices; missing data are empty."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..diagnosis.advice import advise
from ..files.atomic_io import in_words, read_ordinary
from ..files.folder_kind import RUN_FILES, what_to_give
from ..files.jsonl import Line
from ..files.manifest import LARGEST
from ..train.run_record import PlaceNotKnown, RunRecord, require_folder
from .advice import ShownAdvice, read_advice, understood
from .curves import QUANTITIES, VALIDATION, Curve, read_curves
from .events import Event, guard_moves, recorded, seen_checkpoints, skipped_steps
from .stat_maps import Statistics, read_statistics


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: label; unique in a report.
        report: report.json, {} if missing; ``sites`` are its sites.
        curves: quantity -> values over iterations.
        phases: (name, precision, first iteration, last iteration); empty if the precision never changed.
        events: ordered by iteration.
        statistics: from telemetry.jsonl; None if missing.
        advice: from advice.json; without one, derived from the run's statistics.
        unfinished: one line for each file with an incomplete last line.
    """

    name: str
    report: dict[str, Any]
    sites: list
    curves: dict[str, Curve]
    phases: tuple[tuple[str, str, int, int], ...]
    events: tuple[Event, ...]
    statistics: Statistics | None
    advice: tuple[ShownAdvice, ...]
    unfinished: tuple[str, ...] = ()

    @property
    def last(self) -> int:
        """The last iteration with any data; 0 for none."""
        ends = [int(curve.iterations[-1]) for curve in self.curves.values() if len(curve.iterations)]
        ends += [int(self.statistics.iterations[-1])] if self.statistics else []
        return max(ends, default=0)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs, each named by the shortest unique end of its path.

    Raises ValueError: no folder, a folder without a run, a duplicate, or an invalid file.
    """
    if not folders:
        raise ValueError("no run was given: name the folder of one or of several.")
    real = [(f.parent if f.name in RUN_FILES else f).resolve() for f in folders]
    for folder, path in zip(real, folders, strict=True):
        if real.count(folder) > 1:
            raise ValueError(f"{str(path)!r} was given twice: name each run once.")
    return [read_run(folder, name) for folder, name in zip(real, _names(real), strict=True)]


def read_run(folder: Path, name: str | None = None) -> Run:
    """The run in a folder. Raises ValueError as ``read_runs`` does."""
    require_folder(folder)
    if not any((folder / file).exists() for file in RUN_FILES):
        remedy = what_to_give(folder) or "give the folder that train calls run_dir"
        raise ValueError(
            f"{str(folder)!r} is not a run's folder, which has one of {', '.join(RUN_FILES)}: {remedy}."
        )
    record = RunRecord(folder)
    report = record.report() if record.has("report.json") else {}
    sites, report_path = report.get("sites", []), str(folder / "report.json")
    metrics, validation = record.metrics(), record.validation()
    events = skipped_steps(metrics) + recorded(record.events()) + guard_moves(report, report_path)
    if not any(event.kind == "save" for event in events):
        try:
            events += seen_checkpoints(record.checkpoints())
        except PlaceNotKnown as error:
            warnings.warn(f"saves are left out: {error}", stacklevel=2)
    statistics = read_statistics(record.telemetry(), [site["name"] for site in sites])
    events += statistics.went_bad if statistics else ()
    return Run(
        name=folder.name if name is None else name,
        report=report,
        sites=sites,
        curves={
            **read_curves(metrics, QUANTITIES),
            **read_curves(validation, [VALIDATION]),
        },
        phases=_phases(report),
        events=tuple(sorted(events, key=lambda event: (event.first, event.kind))),
        statistics=statistics,
        advice=_advice(folder / "advice.json") or _own_advice(record, report, metrics),
        unfinished=tuple(record.unfinished()),
    )


def _names(folders: Sequence[Path]) -> list[str]:
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _phases(report: dict[str, Any]) -> tuple[tuple[str, str, int, int], ...]:
    phases = report.get("precision", {}).get("phases", [])
    return tuple((p["phase"], p["precision"], p["first"], p["last"]) for p in phases)


def _own_advice(
    record: RunRecord, report: dict[str, Any], metrics: Sequence[Line]
) -> tuple[ShownAdvice, ...]:
    """Advice derived from the run's own statistics."""
    measured = (line.content for line in record.telemetry())
    pieces = advise(measured, report, [line.content for line in metrics])
    return understood(
        {
            "title": f"{piece.title}: {piece.cause}",
            "line": piece.line,
            "sites": list(piece.sites) or None,
            "tensor": piece.tensor,
            **piece.figures,
            "iterations": list(piece.iterations or ()) or None,
        }
        for piece in pieces
    )


def _advice(path: Path) -> tuple[ShownAdvice, ...]:
    try:
        return read_advice(read_ordinary(path, LARGEST), str(path))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({in_words(error)}).") from error

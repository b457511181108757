"""A run, read from its folder, and the advice shown with it. One of RUN_FILES suffices; missing data are empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..diagnosis.advice import advice_of
from ..files.atomic_io import as_value_error, error_text, read_regular
from ..files.manifest import LARGEST
from ..files.strict_json import load_json
from ..files.user_paths import RUN_FILES, path_hint
from ..state.precision_schedule import PrecisionSchedule
from ..train.run_record import RunRecord, require_folder
from .curves import (
    QUANTITIES,
    VALIDATION,
    Curve,
    Event,
    guard_moves,
    read_curves,
    recorded_events,
    skipped_steps,
)
from .heatmaps import Statistics, read_statistics


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
        remedy = path_hint(folder) or "give the folder that train calls run_dir"
        raise ValueError(
            f"{str(folder)!r} is not a run's folder, which has one of {', '.join(RUN_FILES)}: {remedy}."
        )
    record = RunRecord(folder)
    report = record.report() if record.has("report.json") else {}
    sites, report_path = report.get("sites", []), str(folder / "report.json")
    metrics, validation = record.metrics(), record.validation()
    events = skipped_steps(metrics) + recorded_events(record.events()) + guard_moves(report, report_path)
    statistics = read_statistics(record.telemetry(), [site["name"] for site in sites])
    events += statistics.went_bad if statistics else ()
    return Run(
        name=folder.name if name is None else name,
        report=report,
        sites=sites,
        curves={**read_curves(metrics, QUANTITIES), **read_curves(validation, [VALIDATION])},
        phases=_phases(report),
        events=tuple(sorted(events, key=lambda event: (event.first, event.kind))),
        statistics=statistics,
        advice=_advice(folder / "advice.json")
        or parse_advice(piece.as_dict() for piece in advice_of(record, report)),
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
    return tuple((p["phase"], PrecisionSchedule.precision_in_words(p), p["first"], p["last"]) for p in phases)


def _advice(path: Path) -> tuple[ShownAdvice, ...]:
    try:
        return read_advice(read_regular(path, LARGEST), str(path))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error_text(error)}).") from error


@dataclass(frozen=True)
class ShownAdvice:
    """One piece of advice: a title, config lines to paste, and all other fields by name."""

    title: str
    paste: tuple[str, ...]
    details: tuple[tuple[str, str], ...]


def read_advice(content: bytes, path: str) -> tuple[ShownAdvice, ...]:
    """Parses an advice.json, a list. Raises ValueError."""
    with as_value_error(f"{path!r} is no JSON", ": correct it or remove it.", ValueError):
        found = load_json(content)
    if not isinstance(found, list):
        raise ValueError(f"{path!r} has no list of advice: correct it or remove it.")
    return parse_advice(found)


def parse_advice(pieces: Iterable[Any]) -> tuple[ShownAdvice, ...]:
    """Parses pieces: strings, or objects with a title or cause, and an option to paste under 'line'."""
    return tuple(_piece(piece) for piece in pieces)


def _piece(piece: Any) -> ShownAdvice:
    if not isinstance(piece, dict):
        return ShownAdvice(_words(piece), (), ())
    title = next((name for name in ("title", "cause") if piece.get(name)), None)
    paste = (_words(piece["line"]),) if piece.get("line") else ()
    rest = [
        (str(k), _words(v)) for k, v in piece.items() if k not in (title, "line") and v not in (None, [], {})
    ]
    return ShownAdvice(_words(piece[title]) if title else "Advice", paste, tuple(rest))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(v)}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(_words(v) for v in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

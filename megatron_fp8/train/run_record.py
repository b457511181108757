"""The files of a run, read for report, page, advice and `--against`.

An invalid line raises an error with its file and number, and an incomplete report an error with the missing field: if
readers skipped such values silently, two different runs could look equal. An incomplete last line is no error, since a
run that is still writing, or was killed, has one. It is skipped, with a note.

Rejected: each reader checks what it needs. The terminal refused what the page drew, and a comparison took it as equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..files.atomic_io import error_text
from ..files.checkpoint import complete_checkpoints, iteration_of
from ..files.records import Line, has_incomplete_line, read_lines
from ..files.strict_json import check_shape
from ..files.strict_yaml import read_yaml
from ..files.user_paths import RUN_FILES, path_hint
from ..telemetry.stat_registry import TENSORS
from ..telemetry.telemetry import NO_STATISTICS
from .metrics import IterationMetrics
from .report import read_report

_LINES = ("metrics.jsonl", "validation.jsonl", "events.jsonl", "telemetry.jsonl")

_CONFIG_SECTIONS = ("train", "data", "checkpoint")
"""Sections of config.yaml that readers use."""

_METRICS = [field.name for field in fields(IterationMetrics) if field.name != "iteration"]

_PHASE = {"phase": str, "precision": str, "first": int, "last": int}
_STORED = {"weights": int, "bytes": int, "values": int, "warning": (str, None)}
_SITE = {"name": str, "precision": str, "recipe": (str, None), "roles?": (dict, None), "layer?": (int, None)}
_GROUPS = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "data")
_REPORT = {
    "device": str,
    "versions": dict,
    "parallel": {
        "world_size": int,
        "launcher": str,
        "backend": str,
        "sequence_parallel": bool,
        "threads_per_rank": int,
        **dict.fromkeys(_GROUPS, (int, None)),
    },
    "parameters": {"total": int, "non_embedding": int},
    "precision": {
        "bf16": bool,
        "fp8": (str, None),
        "fp8_recipe": (str, None),
        "fp4?": str,
        "fp4_recipe?": str,
        "phases?": [_PHASE],
        "fp8_param?": (_STORED, None),
    },
    "sites": [_SITE],
}
"""The fields of report.json that readers use."""


class FolderNotKnown(ValueError):
    """The folder of a run's checkpoints is unknown."""


@dataclass(frozen=True)
class RunRecord:
    """The files of one run. Each method checks its whole file when it is called; a missing file reads as empty.

    Attributes:
        folder: folder of the run.
    """

    folder: Path

    def has(self, file: str) -> bool:
        """Whether the run has a file of this name."""
        return (self.folder / file).exists()

    def report(self) -> dict[str, Any]:
        """report.json. Raises ValueError if it is missing or lacks a required field."""
        path = self.folder / "report.json"
        report = read_report(self.folder)
        try:
            check_shape(report, _REPORT)
        except ValueError as error:
            raise ValueError(
                f"{str(path)!r} is no run's report: {error}. Give the folder of a run."
            ) from error
        return report

    def config(self) -> dict[str, Any]:
        """config.yaml, with its sections as written; {} if there is none. Raises ValueError."""
        path = self.folder / "config.yaml"
        try:
            values = read_yaml(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{str(path)!r} cannot be read ({error_text(error)}): bring it back as train wrote it, or give"
                f" another run."
            ) from error
        if not isinstance(values, dict) or not all(
            isinstance(values.get(name, {}), dict) for name in _CONFIG_SECTIONS
        ):
            raise ValueError(
                f"{str(path)!r} is not a run's config: it needs sections such as train and data. Give the folder of a"
                " run."
            )
        return values

    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints: checkpoint.folder of its config, or run_dir/checkpoints.

        A relative checkpoint.folder was relative to the run's working directory; its absolute path is in report.json.
        Raises FolderNotKnown if report.json has none; ValueError.
        """
        path = self.config().get("checkpoint", {}).get("folder")
        if not isinstance(path, str | None):
            raise ValueError(
                f"{str(self.folder / 'config.yaml')!r} has checkpoint.folder={path!r}, and that is a path or null: bring"
                " it back as train wrote it, or give"
                f" another run."
            )
        if not path:
            return self.folder / "checkpoints"
        if Path(path).is_absolute():
            return Path(path)
        recorded = self.report().get("checkpoints") if self.has("report.json") else None
        if not isinstance(recorded, str) or not Path(recorded).is_absolute():
            raise FolderNotKnown(
                f"{str(self.folder / 'config.yaml')!r} has checkpoint.folder={path!r}, which counts from where that run"
                " was started, and its report.json has no whole one (checkpoints): write the whole path into config.yaml."
            )
        return Path(recorded)

    def metrics(self) -> list[Line]:
        """metrics.jsonl: iteration, loss and the other metrics. Raises ValueError."""
        return list(map(_metric, read_lines(self.folder / "metrics.jsonl")))

    def validation(self) -> list[Line]:
        """validation.jsonl. Raises ValueError."""
        return list(map(_validation, read_lines(self.folder / "validation.jsonl")))

    def events(self) -> list[Line]:
        """events.jsonl. Raises ValueError."""
        return list(map(_event, read_lines(self.folder / "events.jsonl")))

    def telemetry(self) -> Iterator[Line]:
        """telemetry.jsonl, line by line, as it may be large. Raises ValueError."""
        return map(_telemetry_line, read_lines(self.folder / "telemetry.jsonl"))

    def unfinished(self) -> list[str]:
        """One line for each file with an incomplete last line, which all readers skip."""
        paths = [self.folder / name for name in _LINES]
        return [
            f"the last line of {str(path)!r} is unfinished and left out: the run is still writing, or was ended while it"
            " wrote"
            for path in paths
            if has_incomplete_line(path)
        ]


def run_folder_of(checkpoint: Path) -> Path:
    """The run's folder of a checkpoint; for a checkpoint outside a folder `checkpoints`, its parent."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def later_training_note(path: Path, checkpoint: Path) -> list[str]:
    """A line to print if the run trained on after ``checkpoint``, its newest one; else none.

    Args:
        path: the user's argument, perhaps the run's folder: its checkpoints may lie elsewhere.
        checkpoint: the checkpoint that it selects.
    """
    if checkpoint not in complete_checkpoints(checkpoint.parent)[-1:]:
        return []
    folder = path if (path / "metrics.jsonl").is_file() else run_folder_of(checkpoint)
    try:
        done = [line.iteration() for line in list(read_lines(folder / "metrics.jsonl"))[-1:]]
    except (OSError, ValueError) as error:
        return [f"whether the run trained on after this checkpoint is not known: {error}"]
    saved = iteration_of(checkpoint)
    if not done or done[0] <= saved:
        return []
    return [
        f"the run trained to iteration {done[0]}, and its newest checkpoint is of iteration {saved}: the training"
        " since then is not in it"
    ]


def record_of(path: Path) -> RunRecord:
    """The record of a run, from its folder or one of RUN_FILES in it. Raises ValueError if there is none."""
    folder = path.parent if path.name in RUN_FILES and not path.is_dir() else path
    require_folder(folder)
    return RunRecord(folder)


def require_folder(folder: Path) -> None:
    """Raise ValueError if this is no folder, or is the output of `megatron-fp8 compare`, which contains runs."""
    if not folder.is_dir():
        what = f"{str(folder)!r} is a file" if folder.exists() else f"there is no folder {str(folder)!r}"
        raise ValueError(f"{what}: {path_hint(folder) or 'give the folder of a run'}.")
    if not any((folder / name).exists() for name in RUN_FILES):
        runs = sorted(path for path in (folder / "runs").glob("*") if path.is_dir())
        if runs:
            raise ValueError(
                f"{str(folder)!r} is a comparison's folder, and no run's: give one of its runs, such as {str(runs[0])!r}"
            )


def _metric(line: Line) -> Line:
    line.iteration(1)
    if "lm_loss" not in line.content:
        raise line.wrong("has no lm_loss")
    if line.content.get("skipped", 0) not in (0, 1):
        raise line.wrong(f"has skipped {str(line.content['skipped'])[:60]!r}, and that is 0 or 1")
    return _with_numbers(line, [name for name in line.content if name in _METRICS])


def _with_numbers(line: Line, names: Iterable[str]) -> Line:
    """The line with NaN and infinities, which may be strings, converted to numbers."""
    numbers = {name: line.number_of(name) for name in names}
    words = {name: value for name, value in numbers.items() if isinstance(line.content[name], str)}
    return Line(line.path, line.number, {**line.content, **words}) if words else line


def _validation(line: Line) -> Line:
    line.iteration()
    if "validation_loss" not in line.content:
        raise line.wrong("has no validation_loss")
    return _with_numbers(line, ["validation_loss"])


def _event(line: Line) -> Line:
    line.iteration()
    line.text("event")
    line.text("text")
    return line


def _telemetry_line(line: Line) -> Line:
    line.iteration(1)
    line.text("site")
    tensor = line.text("tensor")
    if tensor.partition(".")[0] not in TENSORS:
        raise line.wrong(f"has tensor {tensor[:60]!r}, and that is one of {', '.join(TENSORS)}")
    if not isinstance(line.content.get("partial", False), bool):
        raise line.wrong(f"has partial {str(line.content['partial'])[:60]!r}, and that is true or false")
    line.texts("went_bad")
    return _with_numbers(line, [name for name in line.content if name not in NO_STATISTICS])

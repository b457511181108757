"""Where records go: telemetry.jsonl, TensorBoard, Weights & Biases. Only the first rank writes.

A record is {"iteration", "site", "tensor", then the statistics by name}; "partial": true after the tensor where it is the
terms of a sum over tensor-parallel ranks; "went_bad": reasons, at the first iteration that was measured so. A scalar's
tag is telemetry/SITE/TENSOR/STATISTIC, with TENSOR_partial for such terms.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

from ..files.lines import records_until
from ..files.records import Board, continued

Record = dict[str, Any]
FILE = "telemetry.jsonl"
_NO_STATISTICS = ("iteration", "site", "tensor", "partial", "went_bad")


class Output(Protocol):
    """Somewhere to write to."""

    def write(self, iteration: int, records: list[Record]) -> None:
        """The records of one iteration."""

    def close(self) -> list[str]:
        """No more come; what a full disk has left out for good, in words."""


def read_records(folder: Path, finished: int) -> list[Record]:
    """The records of a run's first ``finished`` iterations; none if there is no file. What is no record is left out."""
    return [record for _, record in records_until(folder / FILE, finished, 1)[0]]


def scalars(records: list[Record]) -> dict[str, float]:
    """The statistics by tag."""
    found = {}
    for record in records:
        tensor = f"{record['tensor']}_partial" if record.get("partial") else record["tensor"]
        for name, value in record.items():
            if name not in _NO_STATISTICS:
                found[f"telemetry/{record['site']}/{tensor}/{name}"] = value
    return found


class Lines:
    """telemetry.jsonl in a run's folder, after its records of the first ``finished`` iterations. Raises OSError when it
    is made, and not later."""

    def __init__(self, folder: Path, finished: int) -> None:
        self._file = continued(folder / FILE, finished, 1)

    def write(self, iteration: int, records: list[Record]) -> None:
        """One line each."""
        self._file.write("".join(json.dumps(record) + "\n" for record in records).encode())

    def close(self) -> list[str]:
        """Close the file; what it lacks."""
        return self._file.close()


class Scalars:
    """TensorBoard events in a folder; what earlier files have after ``finished`` iterations is not shown."""

    def __init__(self, folder: Path, finished: int) -> None:
        self._board = Board(folder, finished + 1 if finished else 0)

    def write(self, iteration: int, records: list[Record]) -> None:
        """One step."""
        self._board.scalars(iteration, scalars(records))

    def close(self) -> list[str]:
        """Close the file; what it lacks."""
        return self._board.close()


def require_wandb() -> None:
    """ValueError unless Weights & Biases is installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "telemetry wandb=True needs Weights & Biases, which is not installed: pip install wandb, or leave it out"
        )


class WandbRun:
    """A run of Weights & Biases, named as its folder; without a network set WANDB_MODE=offline, and sync later.

    A resumed run goes on in the same run there, which takes no step a second time. ``project`` is WANDB_PROJECT's, or
    'megatron_fp8'.

    Raises ValueError: it is not installed.
    """

    def __init__(self, folder: Path, finished: int) -> None:
        require_wandb()
        import os

        import wandb

        kept = folder / "wandb-run"
        if not (finished and kept.is_file()):
            kept.write_text(os.urandom(4).hex(), encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron_fp8"),
            name=folder.resolve().name,
            id=kept.read_text(encoding="utf-8"),
            dir=str(folder),
            resume="allow",
        )

    def write(self, iteration: int, records: list[Record]) -> None:
        """One step."""
        self._run.log(scalars(records), step=iteration)

    def close(self) -> list[str]:
        """End the run there."""
        self._run.finish()
        return []

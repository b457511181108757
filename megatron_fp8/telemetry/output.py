"""Writes records: telemetry.jsonl, TensorBoard, Weights & Biases. Only the first rank writes.

A record is {"iteration", "site", "tensor", then the statistics by name}. "partial": true follows the tensor
if the values are terms of a sum over tensor-parallel ranks. "went_bad" lists reasons, in the first measured
iteration with a problem. A scalar's tag is telemetry/SITE/TENSOR/STATISTIC, with TENSOR_partial for partial
values.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Protocol

from ..files.records import EventFile, continued, records_until

Record = dict[str, Any]
FILE = "telemetry.jsonl"
NO_STATISTICS = ("iteration", "site", "tensor", "partial", "went_bad")
"""Fields of a record that are not statistics."""


class Output(Protocol):
    """A destination of records."""

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write the records of one iteration."""

    def close(self) -> list[str]:
        """Close the output. Returns text on data that a full disk has dropped for good."""


def read_records(folder: Path, finished: int) -> list[Record]:
    """The records of a run's first ``finished`` iterations; none if the file is missing. Skips invalid lines."""
    return [record for _, record in records_until(folder / FILE, finished, 1)[0]]


def scalars(records: list[Record]) -> dict[str, float]:
    """The statistics by tag."""
    found = {}
    for record in records:
        tensor = f"{record['tensor']}_partial" if record.get("partial") else record["tensor"]
        for name, value in record.items():
            if name not in NO_STATISTICS:
                found[f"telemetry/{record['site']}/{tensor}/{name}"] = value
    return found


class Lines:
    """telemetry.jsonl in a run's folder, appended after the records of the first ``finished`` iterations. Raises
    OSError in the constructor only."""

    def __init__(self, folder: Path, finished: int) -> None:
        self._file = continued(folder / FILE, finished, 1)

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write one line per record."""
        self._file.write("".join(json.dumps(record) + "\n" for record in records).encode())

    def close(self) -> list[str]:
        """Close the file; returns text on lost data."""
        return self._file.close()


class Scalars:
    """TensorBoard events in a folder. Entries of earlier files after ``finished`` iterations are hidden."""

    def __init__(self, folder: Path, finished: int) -> None:
        self._board = EventFile(folder, finished + 1 if finished else 0)

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write one step."""
        self._board.scalars(iteration, scalars(records))

    def close(self) -> list[str]:
        """Close the file; returns text on lost data."""
        return self._board.close()


def require_wandb() -> None:
    """Raises ValueError unless Weights & Biases is installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "telemetry wandb=True needs Weights & Biases, which is not installed: pip install wandb, or leave it out"
        )


class WandbRun:
    """A run in Weights & Biases, named after its folder. Without a network set WANDB_MODE=offline and sync
    later.

    A resumed run continues the same W&B run and repeats no step. The project is WANDB_PROJECT, or
    'megatron_fp8'.

    Raises ValueError: it is not installed.
    """

    def __init__(self, folder: Path, finished: int) -> None:
        require_wandb()
        import os

        import wandb

        saved_id = folder / "wandb-run"
        if not (finished and saved_id.is_file()):
            saved_id.write_text(os.urandom(4).hex(), encoding="utf-8")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "megatron_fp8"),
            name=folder.resolve().name,
            id=saved_id.read_text(encoding="utf-8"),
            dir=str(folder),
            resume="allow",
        )

    def write(self, iteration: int, records: list[Record]) -> None:
        """Write one step."""
        self._run.log(scalars(records), step=iteration)

    def close(self) -> list[str]:
        """Finish the W&B run."""
        self._run.finish()
        return []

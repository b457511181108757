"""The parent checkpoint of a run, until it has one of its own.

    checkpoints/started_from.json    {"checkpoint": "/runs/base/checkpoints/iter_0005000", "iteration": 5000,
                                      "manifest": SHA-256 of its manifest.json, "job": "SLURM job 4711", "sha256": "..."}

It is written before that checkpoint is loaded. Without it a run that is killed before its first save would start again,
by --resume=auto, with random weights, and another attempt of its job at what is the other run's newest by then. As soon
as there is a checkpoint beside it, it is not where training goes on, and says only which iterations the run's records
begin after. It may come from somebody else: what it names is read as any checkpoint is.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.checkpoint import read_manifest
from ..files.disk import in_words, read_ordinary, refuse_link_out, replace_file
from ..files.manifest import LARGEST, MANIFEST, checksum
from ..files.run_lock import job_name
from ..files.strict_json import load_json

FILE = "started_from.json"
_LARGEST = 1 << 16


@dataclass(frozen=True)
class StartedFrom:
    """A checkpoint of another run. ``manifest``: the SHA-256 of its manifest.json, in hex; ``job``: run_lock.job_name of
    the start that wrote this, '' for none."""

    checkpoint: Path
    iteration: int
    manifest: str
    job: str = ""


def write(folder: Path, checkpoint: Path) -> None:
    """Say in ``folder``, where a run's checkpoints will be, that it goes on from ``checkpoint``. Raises OSError."""
    content = {
        "checkpoint": os.path.abspath(checkpoint),
        "iteration": read_manifest(checkpoint).iteration,
        "manifest": _digest(checkpoint),
        "job": job_name(os.environ),
    }
    replace_file(folder / FILE, json.dumps({**content, "sha256": checksum(content)}, indent=1) + "\n")


def read(folder: Path) -> StartedFrom | None:
    """What stands in ``folder``; None if there is no such file. ValueError: it is damaged, or a link out of there."""
    path = folder / FILE
    try:
        refuse_link_out(path)
        found = load_json(read_ordinary(path, _LARGEST))
        if not isinstance(found, dict) or found.get("sha256") != checksum(found):
            raise ValueError("its checksum differs: it is not what was written")
        return _checked(found)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} does not say where this run began ({in_words(error)}): give that checkpoint with"
            " --resume=PATH, or --resume=never to start with random weights."
        ) from error


def _checked(found: dict[str, Any]) -> StartedFrom:
    checkpoint, iteration, manifest = (found.get(name) for name in ("checkpoint", "iteration", "manifest"))
    job = found.get("job", "")
    if not isinstance(checkpoint, str) or not isinstance(manifest, str) or not isinstance(job, str):
        raise ValueError("its checkpoint, manifest and job are not all texts")
    if type(iteration) is not int:
        raise ValueError("its iteration is not a whole number")
    return StartedFrom(Path(checkpoint), iteration, manifest, job)


def names(folder: Path, checkpoint: Path) -> bool:
    """Whether the file in ``folder`` says that its run began at ``checkpoint`` as it is now; not if it is damaged."""
    try:
        started = read(folder)
    except ValueError:
        return False
    if started is None or started.checkpoint != Path(os.path.abspath(checkpoint)):
        return False
    return started.manifest == _digest(checkpoint)


def find(folder: Path) -> Path | None:
    """The checkpoint from which a run without checkpoints of its own in ``folder`` goes on; None: from the beginning.

    ValueError: it is not there any more, another one has its place, or the file is damaged.
    """
    started = read(folder)
    if started is None:
        return None
    problem = "another checkpoint is there now"
    try:
        if _digest(started.checkpoint) == started.manifest:
            return started.checkpoint
    except OSError as error:
        problem = f"its manifest cannot be read ({in_words(error)})"
    raise ValueError(
        f"{str(folder / FILE)!r} says that this run began at {str(started.checkpoint)!r}, and {problem}: bring it back,"
        " or give its new path with --resume=PATH, or --resume=never to start with random weights."
    )


def _digest(checkpoint: Path) -> str:
    return hashlib.sha256(read_ordinary(checkpoint / MANIFEST, LARGEST)).hexdigest()


def content(folder: Path) -> str | None:
    """The file's text, to be put back; None if there is none. Raises ValueError as ``read``, and OSError."""
    return (folder / FILE).read_text(encoding="utf-8") if read(folder) is not None else None


def put_back(folder: Path, text: str | None) -> None:
    """Undo a ``write``; where the disk does not let it, a warning says what to do."""
    try:
        (folder / FILE).unlink() if text is None else replace_file(folder / FILE, text)
    except OSError as error:
        warnings.warn(
            f"{str(folder / FILE)!r} is of the start that was refused, and stays ({in_words(error)}): remove it before"
            " --resume=auto.",
            stacklevel=2,
        )


def iterations_before(folder: Path) -> int:
    """How many iterations were another run's, of which the records of the run in ``folder`` say nothing; where the file
    is damaged 0, with a warning: a run with checkpoints of its own does not need it."""
    try:
        started = read(folder)
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return 0
    return started.iteration if started is not None else 0

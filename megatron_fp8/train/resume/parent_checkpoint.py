"""The parent checkpoint of a run, until it has one of its own.

    checkpoints/started_from.json    {"checkpoint": "/runs/base/checkpoints/iter_0005000", "iteration": 5000,
                                      "manifest": SHA-256 of its manifest.json, "job": "SLURM job 4711", "sha256":
                                      "..."}

It is written before that checkpoint is loaded. Without it, a run that is killed before its first save would restart
with random weights under --resume=auto, and a later attempt of its job would start from the other run's newest
checkpoint by then. Once the run has its own checkpoint, the file only tells after which iteration the run's records
begin. The file may come from another user: the checkpoint that it names is verified like any other.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from ...files.atomic_io import error_text, read_regular, replace_file
from ...files.checkpoint import read_manifest
from ...files.manifest import LARGEST, MANIFEST, read_with_checksum, with_checksum
from ...files.run_lock import job_name
from ...files.strict_json import COUNT, check_shape
from ...files.terminal import warn_user

FILE = "started_from.json"
_LARGEST = 1 << 16


@dataclass(frozen=True)
class ParentCheckpoint:
    """A checkpoint of another run.

    ``manifest``: SHA-256 of its manifest.json, in hex; ``job``: run_lock.job_name of the start that wrote this, '' for
    none.
    """

    checkpoint: Path
    iteration: int
    manifest: str
    job: str = ""


def write(folder: Path, checkpoint: Path) -> None:
    """Record ``checkpoint`` as the run's parent in ``folder``, the run's checkpoint folder. Raises OSError."""
    content = {
        "checkpoint": os.path.abspath(checkpoint),
        "iteration": read_manifest(checkpoint).iteration,
        "manifest": _digest(checkpoint),
        "job": job_name(os.environ),
    }
    replace_file(folder / FILE, with_checksum(content))


def read(folder: Path) -> ParentCheckpoint | None:
    """Read the file in ``folder``; None if there is none. Raises ValueError if it is damaged or links elsewhere."""
    path = folder / FILE
    try:
        content = read_with_checksum(path, _LARGEST)
        check_shape(content, {"checkpoint": str, "iteration": COUNT, "manifest": str, "job?": str})
        return ParentCheckpoint(
            Path(content["checkpoint"]), content["iteration"], content["manifest"], content.get("job", "")
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(path)!r} does not say where this run began ({error_text(error)}): give that checkpoint with"
            " --resume=PATH, or --resume=never to start with random weights."
        ) from error


def is_parent(folder: Path, checkpoint: Path) -> bool:
    """Whether the file in ``folder`` names ``checkpoint`` in its current state; False if the file is damaged."""
    try:
        started = read(folder)
    except ValueError:
        return False
    if started is None or started.checkpoint != Path(os.path.abspath(checkpoint)):
        return False
    return started.manifest == _digest(checkpoint)


def find(folder: Path) -> Path | None:
    """The parent checkpoint of a run that has none of its own in ``folder``; None: the run starts from the beginning.

    Raises ValueError if the parent is missing, if another checkpoint has replaced it, or if the file is damaged.
    """
    started = read(folder)
    if started is None:
        return None
    problem = "another checkpoint is there now"
    try:
        if _digest(started.checkpoint) == started.manifest:
            return started.checkpoint
    except OSError as error:
        problem = f"its manifest cannot be read ({error_text(error)})"
    raise ValueError(
        f"{str(folder / FILE)!r} says that this run began at {str(started.checkpoint)!r}, and {problem}: bring it back,"
        " or give its new path with --resume=PATH, or --resume=never to start with random weights."
    )


def _digest(checkpoint: Path) -> str:
    return hashlib.sha256(read_regular(checkpoint / MANIFEST, LARGEST)).hexdigest()


def content(folder: Path) -> str | None:
    """The file's text, for ``put_back``; None if there is no file. Raises ValueError as ``read``, and OSError."""
    return (folder / FILE).read_text(encoding="utf-8") if read(folder) is not None else None


def put_back(folder: Path, text: str | None) -> None:
    """Undo a ``write``; if that fails, warn with a remedy."""
    try:
        (folder / FILE).unlink() if text is None else replace_file(folder / FILE, text)
    except OSError as error:
        warn_user(
            f"{str(folder / FILE)!r} is of the refused start and could not be removed ({error_text(error)}): remove it"
            " before --resume=auto."
        )


def iterations_before(folder: Path) -> int:
    """Number of iterations that another run trained, before the records of the run in ``folder`` begin.

    0, with a warning, if the file is damaged: a run with its own checkpoints does not need it.
    """
    try:
        started = read(folder)
    except ValueError as error:
        warn_user(str(error))
        return 0
    return started.iteration if started is not None else 0

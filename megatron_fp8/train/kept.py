"""Moves old run folders to `previous-1`, `previous-2`, ...; nothing is removed.

A process may be killed between any two renames. One of them decides: before it, --resume=auto goes on from the earlier
run's latest checkpoint, with its records; after it, it starts as this start was asked to. So the order is

    1. started_from.json: where this start goes on from another run's checkpoint, copied, then written; else moved
    2. all checkpoints but the one that --resume=auto would take, then `latest`
    3. that checkpoint: the rename that decides
    4. left_out.json, records, stacks

A run of which only 4 is there is none to go on with: the next start moves the rest, and says so too.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from ..files.checkpoint import (
    LATEST,
    complete_checkpoints,
    has_usual_name,
    iteration_of,
    latest_checkpoint,
    not_finite_checkpoints,
)
from ..files.disk import free_name, replace_file, sync
from . import started_from
from .left_out import FILE as LEFT_OUT

_RECORDS = (
    *("config.yaml", "report.json", "metrics.jsonl", "validation.jsonl", "events.jsonl", "tensorboard"),
    *("telemetry.jsonl", "wandb", "wandb-run"),
)
_PREVIOUS, _STACKS = "previous", "stacks"


def keep_earlier(
    run_dir: Path, checkpoints: Path, start: Path | None = None, stacks: Path | None = None
) -> list[str]:
    """Move a run's records and checkpoints out of the way, to folders of the same file systems; lines for people. OSError
    if that fails.

    Args:
        start: another run's checkpoint, from which this start goes on; None: it begins anew.
        stacks: the folder of this start's own, whose set-up may have taken long: it stays.
    """
    records = [run_dir / name for name in _RECORDS]
    earlier = [path for path in (run_dir / _STACKS).glob("*") if path != stacks]
    saved = _in_order(checkpoints, with_start=start is None)
    kept = free_name(run_dir / _PREVIOUS)
    inside = is_inside(checkpoints, run_dir)
    kept_saved = kept / checkpoints.name if inside else free_name(checkpoints / _PREVIOUS)
    moved = _begin_at(start, checkpoints, kept_saved) if start is not None else []
    moved += _move([*saved, checkpoints / LEFT_OUT], kept_saved)
    moved_records = [*_move(records, kept), *_move(earlier, kept / _STACKS)]
    if inside:
        return _line(moved + moved_records, kept)
    return [*_line(moved, kept_saved), *_line(moved_records, kept)]


def stands(run_dir: Path, checkpoints: Path) -> bool:
    """Whether there is an earlier run that --resume=auto goes on with: it has checkpoints, or records of what it has done
    since it began at another run's. With a damaged started_from.json too, which `auto` refuses."""
    if complete_checkpoints(checkpoints):
        return True
    try:
        began = started_from.read(checkpoints) is not None
    except ValueError:
        return True
    return began and any(os.path.lexists(run_dir / name) for name in _RECORDS)


def keep_newer(run_dir: Path, checkpoints: Path, start: str) -> list[str]:
    """Move checkpoints that are newer than the one of this name out of the way; OSError if that fails. ``latest`` names
    that one before any is moved: whenever this is interrupted, the next start goes on from there too."""
    done = iteration_of(Path(start))
    newer = [path for path in complete_checkpoints(checkpoints) if iteration_of(path) > done]
    if not newer:
        return []
    if start.startswith("iter_"):
        replace_file(checkpoints / LATEST, f"{start}\n")
    inside = is_inside(checkpoints, run_dir)
    kept = free_name(run_dir / _PREVIOUS) / checkpoints.name if inside else free_name(checkpoints / _PREVIOUS)
    _move(newer, kept)
    names = ", ".join(path.name for path in newer)
    return [f"kept        {names}, of what was trained from {start} before, is in {kept}"]


def is_inside(checkpoints: Path, run_dir: Path) -> bool:
    """Whether a run's checkpoints are in its folder, on the same file system."""
    inside = same_place(checkpoints.parent, run_dir) and not checkpoints.is_symlink()
    return inside and (not checkpoints.exists() or checkpoints.stat().st_dev == run_dir.stat().st_dev)


def own_name(checkpoint: Path, checkpoints: Path) -> str | None:
    """The name that a checkpoint has among those which a run saved in ``checkpoints``, however its path is written; None:
    it is none of them. A copy there under a name of its own is none: its number would say nothing."""
    paths = (checkpoint, Path(os.path.realpath(checkpoint)))
    own = (path.name for path in paths if has_usual_name(path) and same_place(path.parent, checkpoints))
    return next(own, None)


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths lead to one place, however they are written."""
    return os.path.realpath(one) == os.path.realpath(other)


def _begin_at(start: Path, checkpoints: Path, folder: Path) -> list[Path]:
    """Write that this start goes on from ``start``. What said where an earlier one began is copied into ``folder`` first:
    were it moved, --resume=auto would begin with random weights until this is written. What was copied."""
    earlier = checkpoints / started_from.FILE
    copied = os.path.lexists(earlier) and not started_from.names(checkpoints, start)
    if copied:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(earlier, folder / earlier.name, follow_symlinks=False)
        if not earlier.is_symlink():
            sync(folder / earlier.name)
    started_from.write(checkpoints, start)
    return [earlier] if copied else []


def _in_order(checkpoints: Path, *, with_start: bool) -> list[Path]:
    """What is in a folder of checkpoints, in the order in which it goes. ``with_start``: started_from.json too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a `latest` that names none is moved, and nothing is taken
        try:
            taken = latest_checkpoint(checkpoints)
        except ValueError:  # nothing could be taken
            taken = None
    others = [path for path in complete_checkpoints(checkpoints) if path != taken]
    first = [checkpoints / started_from.FILE] if with_start else []
    last = [taken] if taken is not None else []
    return [*first, *not_finite_checkpoints(checkpoints), *others, checkpoints / LATEST, *last]


def _move(paths: list[Path], folder: Path) -> list[Path]:
    """Move those that are there; which."""
    there = [path for path in paths if os.path.lexists(path)]
    if there:
        folder.mkdir(parents=True, exist_ok=True)
    for path in there:
        path.rename(folder / path.name)
    return there


def _line(moved: list[Path], folder: Path) -> list[str]:
    saved = [path.name for path in moved if re.fullmatch(r"iter_\d+", path.name)]
    rest = [path.name for path in moved if path.name not in saved and path.parent.name != _STACKS]
    names = [", ".join(sorted(saved)) if len(saved) < 4 else f"{len(saved)} checkpoints to {max(saved)}"]
    names += rest or ([] if saved else [_STACKS])
    left = ", ".join(filter(None, names))
    return [f"kept        what an earlier run left is in {folder}: {left}"] if moved else []

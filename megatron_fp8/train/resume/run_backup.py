"""Moves old run folders to `previous-1`, `previous-2`, ...; nothing is removed.

A process may be killed between any two renames. One rename decides: before it, --resume=auto continues from the earlier
run's latest checkpoint, with its records; after it, --resume=auto starts as this start was configured. So the order is

    1. started_from.json: copied and then written, if this start continues from another run's checkpoint; else moved
    2. all checkpoints except the one that --resume=auto would choose, then `latest`
    3. that checkpoint: the rename that decides
    4. left_out.json, records, stacks

A run with files of step 4 alone cannot be continued: the next start moves the rest, and reports that too.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from ...files.atomic_io import free_name, replace_file, sync
from ...files.checkpoint import (
    LATEST,
    complete_checkpoints,
    has_usual_name,
    iteration_of,
    latest_checkpoint,
    not_finite_checkpoints,
)
from ..health.skipped_samples import FILE as SKIPPED_SAMPLES
from . import parent_checkpoint

_RECORDS = (
    *("config.yaml", "report.json", "metrics.jsonl", "validation.jsonl", "events.jsonl", "tensorboard"),
    *("telemetry.jsonl", "wandb", "wandb-run"),
)
_PREVIOUS, _STACKS = "previous", "stacks"


def back_up_earlier(
    run_dir: Path, checkpoints: Path, start: Path | None = None, stacks: Path | None = None
) -> list[str]:
    """Move a run's records and checkpoints to folders on the same file systems; return lines to print. Raises OSError.

    Args:
        start: another run's checkpoint from which this start continues; None: it starts anew.
        stacks: folder of this start's own stack dumps, which may exist already after a long set-up: it stays.
    """
    records = [run_dir / name for name in _RECORDS]
    earlier = [path for path in (run_dir / _STACKS).glob("*") if path != stacks]
    saved = _in_order(checkpoints, with_start=start is None)
    backup = free_name(run_dir / _PREVIOUS)
    inside = is_inside(checkpoints, run_dir)
    backup_checkpoints = backup / checkpoints.name if inside else free_name(checkpoints / _PREVIOUS)
    moved = _begin_at(start, checkpoints, backup_checkpoints) if start is not None else []
    moved += _move([*saved, checkpoints / SKIPPED_SAMPLES], backup_checkpoints)
    moved_records = [*_move(records, backup), *_move(earlier, backup / _STACKS)]
    if inside:
        return _line(moved + moved_records, backup)
    return [*_line(moved, backup_checkpoints), *_line(moved_records, backup)]


def stands(run_dir: Path, checkpoints: Path) -> bool:
    """Whether --resume=auto can continue an earlier run.

    It can if the run has checkpoints, or records since its start from another run's checkpoint.

    True with a damaged started_from.json too, which `auto` refuses.
    """
    if complete_checkpoints(checkpoints):
        return True
    try:
        began = parent_checkpoint.read(checkpoints) is not None
    except ValueError:
        return True
    return began and any(os.path.lexists(run_dir / name) for name in _RECORDS)


def back_up_newer(run_dir: Path, checkpoints: Path, start: str) -> list[str]:
    """Move checkpoints newer than the one named ``start``; return lines to print. Raises OSError.

    ``latest`` names ``start`` before any is moved: after an interruption the next start continues from there too.
    """
    done = iteration_of(Path(start))
    newer = [path for path in complete_checkpoints(checkpoints) if iteration_of(path) > done]
    if not newer:
        return []
    if start.startswith("iter_"):
        replace_file(checkpoints / LATEST, f"{start}\n")
    inside = is_inside(checkpoints, run_dir)
    backup = (
        free_name(run_dir / _PREVIOUS) / checkpoints.name if inside else free_name(checkpoints / _PREVIOUS)
    )
    _move(newer, backup)
    names = ", ".join(path.name for path in newer)
    return [f"kept        {names}, of what was trained from {start} before, is in {backup}"]


def is_inside(checkpoints: Path, run_dir: Path) -> bool:
    """Whether a run's checkpoints lie in its folder, on the same file system."""
    inside = same_place(checkpoints.parent, run_dir) and not checkpoints.is_symlink()
    return inside and (not checkpoints.exists() or checkpoints.stat().st_dev == run_dir.stat().st_dev)


def own_name(checkpoint: Path, checkpoints: Path) -> str | None:
    """The name of a checkpoint among those that a run saved in ``checkpoints``, however its path is written.

    None if it is not one of them. A copy with another name is not: its iteration would be unknown.
    """
    paths = (checkpoint, Path(os.path.realpath(checkpoint)))
    own = (path.name for path in paths if has_usual_name(path) and same_place(path.parent, checkpoints))
    return next(own, None)


def same_place(one: Path, other: Path) -> bool:
    """Whether two paths are the same after symlinks are resolved."""
    return os.path.realpath(one) == os.path.realpath(other)


def _begin_at(start: Path, checkpoints: Path, folder: Path) -> list[Path]:
    """Write that this start continues from ``start``; return what was copied.

    The earlier started_from.json is first copied into ``folder``. If it were moved, --resume=auto would start with
    random weights until the new one is written.
    """
    earlier = checkpoints / parent_checkpoint.FILE
    copied = os.path.lexists(earlier) and not parent_checkpoint.names(checkpoints, start)
    if copied:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy2(earlier, folder / earlier.name, follow_symlinks=False)
        if not earlier.is_symlink():
            sync(folder / earlier.name)
    parent_checkpoint.write(checkpoints, start)
    return [earlier] if copied else []


def _in_order(checkpoints: Path, *, with_start: bool) -> list[Path]:
    """Contents of a folder of checkpoints, in the order of the moves. ``with_start``: started_from.json too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a `latest` that names no checkpoint is moved, and none is chosen
        try:
            chosen = latest_checkpoint(checkpoints)
        except ValueError:  # none can be chosen
            chosen = None
    others = [path for path in complete_checkpoints(checkpoints) if path != chosen]
    first = [checkpoints / parent_checkpoint.FILE] if with_start else []
    last = [chosen] if chosen is not None else []
    return [*first, *not_finite_checkpoints(checkpoints), *others, checkpoints / LATEST, *last]


def _move(paths: list[Path], folder: Path) -> list[Path]:
    """Move the paths that exist; return them."""
    existing = [path for path in paths if os.path.lexists(path)]
    if existing:
        folder.mkdir(parents=True, exist_ok=True)
    for path in existing:
        path.rename(folder / path.name)
    return existing


def _line(moved: list[Path], folder: Path) -> list[str]:
    saved = [path.name for path in moved if re.fullmatch(r"iter_\d+", path.name)]
    rest = [path.name for path in moved if path.name not in saved and path.parent.name != _STACKS]
    names = [", ".join(sorted(saved)) if len(saved) < 4 else f"{len(saved)} checkpoints to {max(saved)}"]
    names += rest or ([] if saved else [_STACKS])
    names_text = ", ".join(filter(None, names))
    return [f"kept        what an earlier run left is in {folder}: {names_text}"] if moved else []

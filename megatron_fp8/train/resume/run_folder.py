"""A run's two folders: checks, locks, and backup of old contents.

    run_dir              config.yaml, report.json, metrics.jsonl, validation.jsonl, events.jsonl, tensorboard/, stacks/
    checkpoint.folder    checkpoints; by default run_dir/checkpoints

Both are locked (megatron_fp8.files.run_lock), so that another run with the same checkpoint folder cannot remove this
run's saves. All ranks write checkpoints, so each rank writes a test file there, and rank 0 must see all of them.

What an earlier run left is moved to `previous-1`, `previous-2`, ...; nothing is removed. A process may be killed between
any two renames. One rename decides: before it, --resume=auto continues from the earlier run's latest checkpoint, with its
records; after it, --resume=auto starts as this start was configured. So the order is

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
import socket
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...files.atomic_io import discard, files_not_visible, free_name, remedy, replace_file, sync, write_file
from ...files.checkpoint import (
    LATEST,
    complete_checkpoints,
    has_usual_name,
    iteration_of,
    latest_checkpoint,
    not_finite_checkpoints,
)
from ...files.run_lock import RunLock
from ...files.terminal import printable
from ...state.collectives import first_rank_with, sum_over_ranks
from ..health.skipped_samples import FILE as SKIPPED_SAMPLES
from ..launch.parallel import on_first_rank, release_at_leave
from . import parent_checkpoint

PATIENCE_S = 60.0
"""How long ranks wait to see each other's files: NFS clients cache a folder's contents for up to 60 s."""
_TRIAL = ".trial-"


class RunFolders:
    """A run's folders, locked from `claim` until the process ends. Made, and called, on every rank."""

    def __init__(self, run: Any) -> None:
        self.run_dir = Path(run.run_dir)
        self.checkpoints = checkpoint_folder(run)
        self._option = "checkpoint.folder" if run.checkpoint.folder else "run_dir"
        self._lock: RunLock | None = None

    def claim(self) -> None:
        """Make and lock both folders, and check that all ranks share them. Collective.

        Raises ValueError on every rank if a folder cannot be made or written, is locked by another run, or is not
        shared.
        """
        on_first_rank(self._lock_folders)
        self._test_shared()

    def still_ours(self) -> None:
        """On rank 0: raise OSError if another run has locked the checkpoints' folder."""
        assert self._lock is not None
        self._lock.check()

    def has(self, checkpoint: Path | None) -> bool:
        """Whether a checkpoint is one of this run's, however its path is written."""
        return checkpoint is not None and own_name(checkpoint, self.checkpoints) is not None

    def keep_earlier(self, start: Path | None, stacks: Path | None = None) -> list[str]:
        """Move an earlier run's files to `previous-1`, `previous-2`, ...; return lines to print. Collective.

        For a start from another run's checkpoint (``start``), or from the beginning. Stack dumps of this start stay.

        Raises ValueError.
        """
        work = name_folder_error("run_dir", self.run_dir)(back_up_earlier)
        return on_first_rank(lambda: work(self.run_dir, self.checkpoints, start, stacks))

    @contextmanager
    def recording_parent(self, start: Path | None) -> Iterator[None]:
        """Context for building and loading: record ``start``, another run's checkpoint, before the first own save.

        If this start is killed, --resume=auto continues from ``start``, or from the earlier run in this folder. If it
        is refused (ValueError), the folder is restored. Entered on every rank. Raises ValueError.
        """
        before = None

        def write() -> bool:
            nonlocal before
            if start is None or self.has(start) or can_resume(self.run_dir, self.checkpoints):
                return False
            with name_folder_error(self._option, self._path()):
                before = parent_checkpoint.content(self.checkpoints)
                parent_checkpoint.write(self.checkpoints, start)
            return True

        written = on_first_rank(write)
        try:
            yield
        except ValueError:
            if written and dist.get_rank() == 0:
                parent_checkpoint.put_back(self.checkpoints, before)
            raise

    def keep_newer(self, start: Path) -> list[str]:
        """Move checkpoints newer than ``start``, one of this run's own, to `previous-1`, ...; return lines to print.

        Otherwise a later resume or rollback would take them for this run's. Collective. Raises ValueError.
        """
        name = own_name(start, self.checkpoints)
        assert name is not None, start
        work = name_folder_error("run_dir", self.run_dir)(back_up_newer)
        return on_first_rank(lambda: work(self.run_dir, self.checkpoints, name))

    def check_room(self, needed: int) -> None:
        """Raise ValueError on every rank if the free space is less than `needed` bytes, one checkpoint's size."""

        def look() -> None:
            with name_folder_error(self._option, self._path()):
                disk = shutil.disk_usage(self.checkpoints)
            if disk.total and disk.free < needed:  # some file systems report a size of 0
                raise ValueError(
                    f"{self._option}={str(self._path())!r}: there is room for {disk.free / 2**20:,.0f} MiB, and a"
                    f" checkpoint takes about {needed / 2**20:,.0f} MiB. Make room, or give another folder with"
                    " --checkpoint.folder=FOLDER."
                )

        on_first_rank(look)

    def _path(self) -> Path:
        return self.checkpoints if self._option == "checkpoint.folder" else self.run_dir

    def _lock_folders(self) -> None:
        locks = [("run_dir", self.run_dir)]
        if not same_place(self.checkpoints, self.run_dir):
            locks.append((self._option, self.checkpoints))
        for option, folder in locks:
            configured = self._path() if folder == self.checkpoints else folder
            with name_folder_error(option, configured):
                self._lock = RunLock(folder, option)
                self._lock.take(lambda text: print(printable(f"lock        {text}"), flush=True))
            release_at_leave(self._lock.release)
            with name_folder_error(option, configured):
                for leftover in folder.glob(f"{_TRIAL}*"):
                    discard(leftover)
                _test_write(folder)

    def _test_shared(self) -> None:
        """Check that each rank sees rank 0's test file, and that rank 0 sees every rank's."""
        if dist.get_world_size() == 1:
            return
        rank, configured = dist.get_rank(), str(self._path())
        token, of_first = on_first_rank(lambda: (uuid.uuid4().hex, configured))
        names = [f"{_TRIAL}{token}-{other}" for other in range(dist.get_world_size())]
        mine, size, problem = self.checkpoints / names[rank], len(token), ""
        try:
            if rank and files_not_visible(self.checkpoints, {names[0]: size}, PATIENCE_S):
                problem = "it does not have there what rank 0 has written"
                problem += f", and was given {configured!r}" if configured != of_first else ""
            else:
                write_file(mine, token)
        except OSError as error:
            problem = f"it cannot write there ({error.strerror})"
        first = first_rank_with(f"rank {rank} on {socket.gethostname()}: {problem}" if problem else None)
        wrong = sum_over_ranks(int(bool(problem)))
        try:
            if first is None:
                sizes = dict.fromkeys(names, size)
                missing = on_first_rank(lambda: files_not_visible(self.checkpoints, sizes, PATIENCE_S))
                wrong = len(missing)
                if missing:
                    first = 0, f"rank 0 does not see what rank {names.index(missing[0])} has written"
        finally:
            mine.unlink(missing_ok=True)
        if first is not None:
            more = f" (and {wrong - 1} more ranks)" if wrong > 1 else ""
            raise ValueError(
                f"{self._option}={str(self._path())!r} is not shared by all ranks: {first[1]}{more}. Give a folder on a"
                " file system that all nodes have under the same path."
            )


def checkpoint_folder(run: Any) -> Path:
    """The folder of this run's checkpoints."""
    return Path(run.checkpoint.folder) if run.checkpoint.folder else Path(run.run_dir) / "checkpoints"


def _test_write(folder: Path) -> None:
    """Write, sync and rename a file of a few KiB, as saving does."""
    trial = folder / f"{_TRIAL}{uuid.uuid4().hex}"
    try:
        write_file(trial, "x" * 4096)
        renamed = trial.with_name(f"{trial.name}-renamed")
        trial.rename(renamed)
        renamed.unlink()
    finally:
        trial.unlink(missing_ok=True)


@contextmanager
def name_folder_error(option: str, folder: Path) -> Iterator[None]:
    """Turn an OSError into a ValueError that names the folder, its option and the cause."""
    try:
        yield
    except OSError as error:
        in_the_way = next(
            (p for p in (folder, *folder.parents) if os.path.lexists(p) and not os.path.isdir(p)), None
        )
        reason = error.strerror or str(error)
        if in_the_way:
            reason = (
                f"{str(in_the_way)!r} is a file" if in_the_way.is_file() else f"{reason}: {str(in_the_way)!r}"
            )
        elif error.filename and Path(error.filename) != folder:
            reason += f": {str(error.filename2 or error.filename)!r}"
        raise ValueError(
            f"{option}={str(folder)!r} cannot be written ({reason}): {remedy(error)}, or give another folder with"
            f" --{option}=FOLDER."
        ) from error


_RECORDS = (
    *("config.yaml", "report.json", "metrics.jsonl", "validation.jsonl", "events.jsonl", "tensorboard"),
    *("telemetry.jsonl", "wandb", "wandb-run"),
)
_PREVIOUS, _STACKS = "previous", "stacks"


# ------------------------------------------------------------------------------------------ earlier runs' files


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


def can_resume(run_dir: Path, checkpoints: Path) -> bool:
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

    None if it is not one of them, or is a copy with another name: its iteration would be unknown.
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
    copied = os.path.lexists(earlier) and not parent_checkpoint.is_parent(checkpoints, start)
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

"""A run's two folders: checks, locks, and backup of old contents.

    run_dir              config.yaml, report.json, metrics.jsonl, validation.jsonl, events.jsonl, tensorboard/, stacks/
    checkpoint.folder    checkpoints; by default run_dir/checkpoints

Both are locked (megatron_fp8.files.run_lock), so that another run with the same checkpoint folder cannot remove this
run's saves. All ranks write checkpoints, so each rank writes a test file there, and rank 0 must see all of them.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...files.atomic_io import discard, remedy, unseen, write_file
from ...files.run_lock import RunLock
from ...files.terminal import printable
from ...state.collectives import first_rank_with, total
from ..launch.parallel import on_first_rank, release_at_leave
from . import parent_checkpoint, run_backup
from .run_backup import own_name, same_place

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

        Stacks of this start stay. This start continues from another run's checkpoint (``start``), or begins anew.
        Raises ValueError.
        """

        def move() -> list[str]:
            with naming("run_dir", self.run_dir):
                return run_backup.back_up_earlier(self.run_dir, self.checkpoints, start, stacks)

        return on_first_rank(move)

    @contextmanager
    def recording_parent(self, start: Path | None) -> Iterator[None]:
        """Context for building and loading: record ``start``, another run's checkpoint, before the first own save.

        If this start is killed, --resume=auto continues from ``start``, or from the earlier run in this folder. If it
        is refused (ValueError), the folder is restored. Entered on every rank. Raises ValueError.
        """
        before = None

        def write() -> bool:
            nonlocal before
            if start is None or self.has(start) or run_backup.stands(self.run_dir, self.checkpoints):
                return False
            with naming(self._option, self._path()):
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

        def move() -> list[str]:
            with naming("run_dir", self.run_dir):
                name = own_name(start, self.checkpoints)
                assert name is not None, start
                return run_backup.back_up_newer(self.run_dir, self.checkpoints, name)

        return on_first_rank(move)

    def check_room(self, needed: int) -> None:
        """Raise ValueError on every rank if the free space is less than `needed` bytes, one checkpoint's size."""

        def look() -> None:
            with naming(self._option, self._path()):
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
            with naming(option, configured):
                self._lock = RunLock(folder, option)
                self._lock.take(lambda text: print(printable(f"lock        {text}"), flush=True))
            release_at_leave(self._lock.release)
            with naming(option, configured):
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
            if rank and unseen(self.checkpoints, {names[0]: size}, PATIENCE_S):
                problem = "it does not have there what rank 0 has written"
                problem += f", and was given {configured!r}" if configured != of_first else ""
            else:
                write_file(mine, token)
        except OSError as error:
            problem = f"it cannot write there ({error.strerror})"
        first = first_rank_with(f"rank {rank} on {socket.gethostname()}: {problem}" if problem else None)
        wrong = total(int(bool(problem)))
        try:
            if first is None:
                sizes = dict.fromkeys(names, size)
                missing = on_first_rank(lambda: unseen(self.checkpoints, sizes, PATIENCE_S))
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
def naming(option: str, folder: Path) -> Iterator[None]:
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

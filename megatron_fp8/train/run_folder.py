"""A run's two folders: checked, locked, old contents kept.

    run_dir              config.yaml, report.json, metrics.jsonl, validation.jsonl, events.jsonl, tensorboard/, stacks/
    checkpoint.folder    checkpoints; by default run_dir/checkpoints

Both are locked (megatron_fp8.files.run_lock), so that no other run removes this one's saves, whatever its run_dir. All
ranks write checkpoints, so all ranks try that folder: each writes a file there, and rank 0 must see them all.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..files.disk import discard, remedy, unseen, write_file
from ..files.run_lock import RunLock
from ..files.terminal import printable
from ..state.ranks import first_to_say, total
from . import kept, started_from
from .kept import own_name, same_place
from .launch.meeting import FIRST_LINE_S
from .launch.parallel import on_first_rank, until_leave

PATIENCE_S = 60.0
"""How long ranks wait to see each other's files: clients of NFS look at a folder again after at most 60 s."""
_TRIAL = ".trial-"


class RunFolders:
    """A run's folders, from `claim` until the ranks part. Made, and called, on every rank."""

    def __init__(self, run: Any) -> None:
        self.run_dir = Path(run.run_dir)
        self.checkpoints = checkpoint_folder(run)
        self._option = "checkpoint.folder" if run.checkpoint.folder else "run_dir"
        self._lock: RunLock | None = None

    def claim(self) -> None:
        """Make both folders, hold them, and see that all ranks mean the same ones. Collective.

        Raises ValueError, on every rank: a folder cannot be made or written, another run has it, it is not shared.
        """
        with self._saying_what_is_waited_for():
            on_first_rank(self._take)
            self._try_together()

    def still_ours(self) -> None:
        """On rank 0: raise OSError if another run has taken over the checkpoints' folder."""
        assert self._lock is not None
        self._lock.check()

    def has(self, checkpoint: Path | None) -> bool:
        """Whether a checkpoint is one of this run's, however its path is written."""
        return checkpoint is not None and own_name(checkpoint, self.checkpoints) is not None

    def keep_earlier(self, start: Path | None, stacks: Path | None = None) -> list[str]:
        """What an earlier run left moves to `previous-1`, `previous-2`, ..., but for the stacks of this start, which goes
        on from another run's checkpoint (``start``), or begins anew. Lines for people. Collective. Raises ValueError."""

        def move() -> list[str]:
            with naming("run_dir", self.run_dir):
                return kept.keep_earlier(self.run_dir, self.checkpoints, start, stacks)

        return on_first_rank(move)

    @contextmanager
    def remembering(self, start: Path | None) -> Iterator[None]:
        """While all is made and loaded: whatever ends this start, --resume=auto goes on from another run's checkpoint,
        ``start``, or with the earlier run that stands here. A start that is refused (ValueError) leaves what was there.
        Entered on every rank. Raises ValueError."""
        before = None

        def write() -> bool:
            nonlocal before
            if start is None or self.has(start) or kept.stands(self.run_dir, self.checkpoints):
                return False
            with naming(self._option, self._given()):
                before = started_from.content(self.checkpoints)
                started_from.write(self.checkpoints, start)
            return True

        written = on_first_rank(write)
        try:
            yield
        except ValueError:
            if written and dist.get_rank() == 0:
                started_from.put_back(self.checkpoints, before)
            raise

    def keep_newer(self, start: Path) -> list[str]:
        """What is newer than one of this run's own checkpoints, where it goes on, moves to `previous-1`, ...: else it
        would be taken for this run's, to resume from or to go back to. A line for people if there is any. Collective.
        Raises ValueError."""

        def move() -> list[str]:
            with naming("run_dir", self.run_dir):
                name = own_name(start, self.checkpoints)
                assert name is not None, start
                return kept.keep_newer(self.run_dir, self.checkpoints, name)

        return on_first_rank(move)

    def check_room(self, needed: int) -> None:
        """Raise ValueError, on every rank, if there is surely no room for a checkpoint of `needed` bytes."""

        def look() -> None:
            with naming(self._option, self._given()):
                disk = shutil.disk_usage(self.checkpoints)
            if disk.total and disk.free < needed:  # some file systems do not know, and say 0
                raise ValueError(
                    f"{self._option}={str(self._given())!r}: there is room for {disk.free / 2**20:,.0f} MiB, and a"
                    f" checkpoint takes about {needed / 2**20:,.0f} MiB. Make room, or give another folder with"
                    " --checkpoint.folder=FOLDER."
                )

        on_first_rank(look)

    def _given(self) -> Path:
        return self.checkpoints if self._option == "checkpoint.folder" else self.run_dir

    def _take(self) -> None:
        locks = [("run_dir", self.run_dir)]
        if not same_place(self.checkpoints, self.run_dir):
            locks.append((self._option, self.checkpoints))
        for option, folder in locks:
            given = self._given() if folder == self.checkpoints else folder
            with naming(option, given):
                self._lock = RunLock(folder, option)
                self._lock.take(lambda text: print(printable(f"lock        {text}"), flush=True))
            until_leave(self._lock.release)
            with naming(option, given):
                for leftover in folder.glob(f"{_TRIAL}*"):
                    discard(leftover)
                _try_to_write(folder)

    @contextmanager
    def _saying_what_is_waited_for(self) -> Iterator[None]:
        """A line from rank 0 if it takes long: all ranks have come, so the meeting names none of them."""
        text = (
            f"waiting     {FIRST_LINE_S:.0f} s so far: the file system of {str(self.run_dir)!r} is slow to answer, or"
            f" ranks do not see each other's files in {str(self.checkpoints)!r}, which may take a network file system"
            f" {PATIENCE_S:.0f} s"
        )
        line = threading.Timer(FIRST_LINE_S, print, (text,), {"file": sys.stderr, "flush": True})
        line.daemon = True
        if dist.get_rank() == 0:
            line.start()
        try:
            yield
        finally:
            line.cancel()

    def _try_together(self) -> None:
        """Each rank sees rank 0's token in the folder, writes its own, and rank 0 sees them all."""
        if dist.get_world_size() == 1:
            return
        rank, given = dist.get_rank(), str(self._given())
        token, of_first = on_first_rank(lambda: (uuid.uuid4().hex, given))
        names = [f"{_TRIAL}{token}-{other}" for other in range(dist.get_world_size())]
        mine, size, problem = self.checkpoints / names[rank], len(token), ""
        try:
            if rank and unseen(self.checkpoints, {names[0]: size}, PATIENCE_S):
                problem = "it does not have there what rank 0 has written"
                problem += f", and was given {given!r}" if given != of_first else ""
            else:
                write_file(mine, token)
        except OSError as error:
            problem = f"it cannot write there ({error.strerror})"
        first = first_to_say(f"rank {rank} on {socket.gethostname()}: {problem}" if problem else None)
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
                f"{self._option}={str(self._given())!r} is not shared by all ranks: {first[1]}{more}. Give a folder on a"
                " file system that all nodes have under the same path."
            )


def checkpoint_folder(run: Any) -> Path:
    """Where this run's checkpoints are."""
    return Path(run.checkpoint.folder) if run.checkpoint.folder else Path(run.run_dir) / "checkpoints"


def _try_to_write(folder: Path) -> None:
    """A file of a few KiB is written, synced and renamed: what saving needs."""
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
    """An OSError becomes a ValueError that names the folder, the option that set it, and the cause."""
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

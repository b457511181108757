"""A cache folder with one writer; other processes wait.

    cache/NAME/         NAME is a digest, 32 digits, of all inputs of its files
        .lock           of the current writer (files/run_lock.py), on any file system
        .RANDOM/        incomplete files
        ...             complete files

A killed process leaves `.lock` and `.RANDOM/`. The next writer of this folder removes them. The next writer of another
folder in the cache removes them too, if that process has certainly ended or did not renew its lock for an hour.
Leftovers of another user's process are renamed, and their owner's next start removes them.
"""

from __future__ import annotations

import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...files.atomic_io import discard
from ...files.run_lock import LOCK, LockHeld, RunLock, surely_ended
from ...files.terminal import printable

_LOOK_S = 1.0
"""Seconds between two checks of a folder that another process fills."""
_ABANDONED_S = 3600.0
"""Seconds without renewal after which an unwatched lock counts as abandoned, by its file system's clock."""
_RANDOM = "[0-9a-f]" * 32
"""Pattern of 32 hexadecimal digits: digests (NAME) and random names."""


@contextmanager
def cache_writer(folder: Path, option: str) -> Iterator[tuple[RunLock, Path]]:
    """Lock `folder`, after a wait if needed; yield the lock and a new inner folder for writing.

    Another process may have filled the folder meanwhile. Call the lock's `check` before complete files get their names.
    The inner folder is removed at the end.

    Args:
        folder: named by 32 hexadecimal digits.
        option: the user's option for the cache, for messages.

    Raises OSError if the folder or its content cannot be created.
    """
    lock = _take(folder, option)
    try:
        _remove_unfinished(folder)
        _remove_leftovers(folder)
        unfinished = folder / f".{uuid.uuid4().hex}"
        try:
            unfinished.mkdir()
            yield lock, unfinished
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    finally:
        _release(lock)


def _take(folder: Path, option: str) -> RunLock:
    printed: set[str] = set()

    def say_once(text: str) -> None:
        if text not in printed:
            print(printable(f"lock        {text}"), file=sys.stderr, flush=True)
        printed.add(text)

    while True:
        # Without a job: two runs of one SLURM job may run at the same time, and need the same folder.
        lock = RunLock(folder, option, environ={})
        try:
            lock.take(say_once)
            return lock
        except LockHeld as held:
            say_once(f"waiting for {held.who}, which makes the same in {str(folder)!r}")
            time.sleep(_LOOK_S)
        except PermissionError:  # another user's unlocked folder, or there is no such folder
            aside = folder.with_name(uuid.uuid4().hex)
            folder.rename(aside)
            say_once(f"{str(folder)!r} was left by another user's start: moved to {str(aside)!r}")


def _release(lock: RunLock) -> None:
    lock.release()
    with suppress(OSError):  # not empty, as expected
        lock.folder.rmdir()


def _remove_unfinished(folder: Path) -> None:
    for leftover in folder.glob(f".{_RANDOM}"):
        discard(leftover)


def _remove_leftovers(own_folder: Path) -> None:
    """Remove incomplete files of killed processes in the folders beside `ours`, which is locked."""
    now = (own_folder / LOCK).stat().st_mtime  # the file system's clock, which may differ from this machine's
    for unfinished in own_folder.parent.glob(
        f"{_RANDOM}/.{_RANDOM}"
    ):  # nothing else: other folders may be runs
        path = unfinished.with_name(LOCK)
        if path.parent == own_folder:
            continue
        with suppress(LockHeld, OSError):  # it is alive after all, or another user's
            if surely_ended(path) or now - path.stat().st_mtime > _ABANDONED_S:
                lock = RunLock(path.parent, "", environ={}, stale=0.0)
                lock.take(lambda _: None)
                try:
                    _remove_unfinished(path.parent)
                finally:
                    _release(lock)

"""A cache folder with one writer; other processes wait.

    cache/NAME/         NAME is a digest, 32 digits, of all that its files are made from
        .lock           of whoever fills it now (files/run_lock.py), on any file system
        .RANDOM/        what is not whole yet
        ...             files that are whole

A process that is killed leaves `.lock` and `.RANDOM/`. Whoever fills this folder next removes them, and whoever fills
another one of the cache does, where that process has surely ended or did not renew its lock for an hour. What another
user's process left is moved to another name, where its owner's next start removes it.
"""

from __future__ import annotations

import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...files.disk import discard
from ...files.run_lock import LOCK, LockHeld, RunLock, surely_ended
from ...files.terminal import printable

_LOOK_S = 1.0
"""Seconds between two looks at what another process fills."""
_ABANDONED_S = 3600.0
"""Seconds for which a lock that nobody waits for was not renewed, by the clock of its file system."""
_RANDOM = "[0-9a-f]" * 32
"""Names of 32 hexadecimal digits: digests, as NAME is one, and what is random."""


@contextmanager
def filling(folder: Path, option: str) -> Iterator[tuple[RunLock, Path]]:
    """Hold `folder`, waiting while another process does; the lock, and a new folder inside to write into.

    By then the other one may have filled it. Call the lock's `check` before what is whole gets its name. The inner folder
    is removed at the end.

    Args:
        folder: named by 32 hexadecimal digits.
        option: what the user set the cache with, for messages.

    Raises OSError: the folder or something in it cannot be made.
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
        _let_go(lock)


def _take(folder: Path, option: str) -> RunLock:
    said: set[str] = set()

    def say_once(text: str) -> None:
        if text not in said:
            print(printable(f"lock        {text}"), file=sys.stderr, flush=True)
        said.add(text)

    while True:
        # Without a job: two runs of one SLURM job may live side by side, and want the same.
        lock = RunLock(folder, option, environ={})
        try:
            lock.take(say_once)
            return lock
        except LockHeld as held:
            say_once(f"waiting for {held.who}, which makes the same in {str(folder)!r}")
            time.sleep(_LOOK_S)
        except PermissionError:  # nobody holds it, and another user made it; or there is no such folder
            aside = folder.with_name(uuid.uuid4().hex)
            folder.rename(aside)
            say_once(f"{str(folder)!r} was left by another user's start: moved to {str(aside)!r}")


def _let_go(lock: RunLock) -> None:
    lock.release()
    with suppress(OSError):  # it holds something, as it should
        lock.folder.rmdir()


def _remove_unfinished(folder: Path) -> None:
    for left in folder.glob(f".{_RANDOM}"):
        discard(left)


def _remove_leftovers(ours: Path) -> None:
    """Remove what killed processes left unfinished in the folders beside `ours`, which is locked."""
    now = (
        (ours / LOCK).stat().st_mtime
    )  # its file system's clock, which that of this machine need not agree with
    for unfinished in ours.parent.glob(f"{_RANDOM}/.{_RANDOM}"):  # nothing else: runs may lie beside it
        path = unfinished.with_name(LOCK)
        if path.parent == ours:
            continue
        with suppress(LockHeld, OSError):  # it lives after all, or it is another user's
            if surely_ended(path) or now - path.stat().st_mtime > _ABANDONED_S:
                lock = RunLock(path.parent, "", environ={}, stale=0.0)
                lock.take(lambda _: None)
                try:
                    _remove_unfinished(path.parent)
                finally:
                    _let_go(lock)

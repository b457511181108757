"""Atomic files: written, synced, replaced, removed; on local and network file systems."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from pathlib import Path
from typing import BinaryIO


def write_file(path: Path, content: str | bytes) -> None:
    """Write ``content``, text as UTF-8, and wait until it is on the disk."""
    with path.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: str | bytes) -> None:
    """Put ``content`` in place of what the file holds: whoever looks, now or after a crash, sees the old or the new.

    OSError for a pipe or a device (/dev/null, say), which a file must not take the place of.
    """
    if path.exists() and not path.is_dir():
        ordinary(path.stat())
    beside = path.with_name(f".{path.name}.new")
    discard(beside)  # of a killed process, or a link that would be written through
    try:
        write_file(beside, content)
        beside.replace(path)
    except BaseException:  # a full disk keeps no half of it
        discard(beside)
        raise
    sync(path.parent)


def discard(path: Path) -> None:
    """Remove what has this name: a file, a folder and all in it, or a link, never what it points to; or nothing."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return


def free_name(path: Path) -> Path:
    """``path-1``, ``path-2``, ...: the first after all that are taken."""
    start = f"{path.name}-"
    taken = [entry.name[len(start) :] for entry in path.parent.glob(f"{start}*")]
    return path.with_name(f"{start}{1 + max((int(n) for n in taken if n.isdecimal()), default=0)}")


def unseen(folder: Path, sizes: dict[str, int], patience: float) -> list[str]:
    """Those files of ``folder`` that cannot be seen from here in their size; waits up to ``patience`` s for them.

    Network file systems show another machine's files seconds late.
    """
    deadline, pause = time.monotonic() + patience, 0.02
    while missing := [name for name, size in sizes.items() if _size(folder / name) != size]:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(2 * pause, 1.0)
        _refresh(folder)
    return missing


def _size(path: Path) -> int | None:
    """Bytes of a file, None if it cannot be opened. Opening asks the server; looking at the name may ask a cache."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_size
    except OSError:
        return None


def _refresh(folder: Path) -> None:
    """Read the folder's names anew: a network client forgets then which names were not there."""
    if folder.is_dir():
        os.listdir(folder)


def in_words(error: BaseException | None) -> str:
    """What an error says, without the number and the path that an OSError's own text has."""
    return getattr(error, "strerror", None) or str(error)


def remedy(error: BaseException) -> str:
    """What helps against an OSError, or one of safetensors', where something is written, in a few words."""
    told = re.search(r"\(os error (\d+)\)", str(error))  # as Rust says it
    code = int(told[1]) if told else getattr(error, "errno", None)
    if code in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        None,
    ):  # NumPy gives no number where it wrote only a part
        return "make room there"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make it writable"
    if code in (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
    ):  # files/resource_limits.py says which
        return "raise that limit"
    return "see what is there"


def refuse_link_out(path: Path) -> None:
    """ValueError if a file that somebody else may have made is a link out of its folder: it could be any file of this
    machine, which a copy or an export would give away.

    The folder itself may be a link. From a snapshot in Hugging Face's cache links lead to the blobs of the same model.
    """
    if not os.path.islink(path):  # nor what cannot be looked at, which its reader finds
        return
    home, target = (Path(os.path.realpath(each)) for each in (path.parent, path))
    snapshots = [above for above in home.parents if above.name == "snapshots"][:1]
    if not any(target.is_relative_to(root) for root in (home, *(s.parent / "blobs" for s in snapshots))):
        raise ValueError(
            f"{str(path)!r} is a link out of its folder, to {str(target)!r}: put a copy in its place if it is meant."
        )


def open_ordinary(path: Path, largest: int) -> BinaryIO:
    """An ordinary file, open to be read. OSError if it is something else, or too large."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        size = ordinary(os.fstat(handle)).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, too many for what it should be")
    except OSError:
        os.close(handle)
        raise
    return open(handle, "rb")


def read_ordinary(path: Path, largest: int) -> bytes:
    """The bytes of an ordinary file. OSError if it is something else, or too large."""
    with open_ordinary(path, largest) as stream:
        return stream.read()


def ordinary(status: os.stat_result) -> os.stat_result:
    """``status`` of an ordinary file; OSError of a folder, and of a pipe or device, whose reading might never end."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file")
    return status

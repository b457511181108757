"""Atomic files: write, sync, replace and remove; on local and network file systems."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO


def write_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) and wait until it is on the disk."""
    with path.open("wb") as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or a folder's directory entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file's content atomically: readers see the old or the new content, even after a crash.

    Raises OSError for a pipe or a device (such as /dev/null), which must not be replaced by a file.
    """
    if path.exists() and not path.is_dir():
        require_regular(path.stat())
    temporary = path.with_name(f".{path.name}.new")
    discard(temporary)  # left by a killed process, or a link that would be followed
    try:
        write_file(temporary, content)
        temporary.replace(path)
    except BaseException:  # after a full disk no partial file remains
        discard(temporary)
        raise
    sync(path.parent)


def write_result(path: Path, text: str) -> None:
    """Write a file that a user named: atomically, but a device, a pipe or this process's own output as it is."""
    if (stream := own_output(path)) is not None:
        print(text, end="", file=stream, flush=True)
    elif path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
    else:
        replace_file(path, text)


def own_output(path: Path) -> TextIO | None:
    """This process's stdout or stderr, if the path is one of them.

    With ``> log`` /dev/stdout is a link to an ordinary file: to replace or remove it takes it from the whole machine.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if path.exists() and os.path.samestat(path.stat(), os.fstat(number)):
            return stream
    return None


def discard(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link (not its target), if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return


def free_name(path: Path) -> Path:
    """``path-1``, ``path-2``, ...: the first number after all existing ones."""
    start = f"{path.name}-"
    suffixes = [entry.name[len(start) :] for entry in path.parent.glob(f"{start}*")]
    return path.with_name(f"{start}{1 + max((int(n) for n in suffixes if n.isdecimal()), default=0)}")


def files_not_visible(folder: Path, sizes: dict[str, int], patience: float) -> list[str]:
    """The files of ``folder`` that are not visible here in their full size; waits up to ``patience`` s for them.

    Network file systems show another machine's files seconds late.
    """
    deadline, pause = time.monotonic() + patience, 0.02
    while missing := [name for name, size in sizes.items() if _size(folder / name) != size]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        time.sleep(min(pause, remaining))
        pause = min(2 * pause, 1.0)
        _refresh(folder)
    return missing


def _size(path: Path) -> int | None:
    """Size of a file in bytes, None if it cannot be opened. Opening it asks the server; a stat may use a cache."""
    try:
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_size
    except OSError:
        return None


def _refresh(folder: Path) -> None:
    """List the folder, so that a network client drops its cache of missing names."""
    if folder.is_dir():
        os.listdir(folder)


def error_text(error: BaseException | None) -> str:
    """An error's message, without an OSError's number and path."""
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def as_value_error(
    what: str,
    remedy: str | None = None,
    errors: type[Exception] | tuple[type[Exception], ...] = OSError,
    raises: type[Exception] = ValueError,
) -> Iterator[None]:
    """Context: one of ``errors`` becomes a ValueError (``raises``) in one line, "WHAT (cause)REMEDY".

    Without a ``remedy``: "WHAT: cause".
    """
    try:
        yield
    except errors as error:
        cause = error_text(error)
        raise raises(f"{what}: {cause}" if remedy is None else f"{what} ({cause}){remedy}") from error


def remedy(error: BaseException) -> str:
    """A remedy, in a few words, for a write error: an OSError, or one of safetensors."""
    os_error = re.search(r"\(os error (\d+)\)", str(error))  # the form of Rust's messages
    code = int(os_error[1]) if os_error else getattr(error, "errno", None)
    if code in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        None,
    ):  # NumPy sets no errno after a partial write
        return "make room there"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "make it writable"
    if code in (
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
    ):  # files/resource_limits.py names the limit
        return "raise that limit"
    return "see what is there"


def refuse_link_out(path: Path) -> None:
    """Raise ValueError if a file that another user may have made is a link out of its folder.

    Such a link could lead to any file of this machine, which a copy or an export would disclose. The folder itself may
    be a link. In a snapshot of Hugging Face's cache, links may lead to the blobs of the same model.
    """
    if not os.path.islink(path):  # a path that cannot be examined is left to its reader
        return
    home, target = (Path(os.path.realpath(each)) for each in (path.parent, path))
    snapshots = [above for above in home.parents if above.name == "snapshots"][:1]
    if not any(target.is_relative_to(root) for root in (home, *(s.parent / "blobs" for s in snapshots))):
        raise ValueError(
            f"{str(path)!r} is a link out of its folder, to {str(target)!r}: put a copy in its place if it is meant."
        )


def open_regular(path: Path, largest: int) -> BinaryIO:
    """An ordinary file, opened for reading. Raises OSError if it is not ordinary, or too large."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        size = require_regular(os.fstat(handle)).st_size
        if size > largest:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, too many for what it should be")
    except OSError:
        os.close(handle)
        raise
    return open(handle, "rb")


def read_regular(path: Path, largest: int) -> bytes:
    """The bytes of an ordinary file. Raises OSError if it is not ordinary, or too large."""
    with open_regular(path, largest) as stream:
        return stream.read()


def require_regular(status: os.stat_result) -> os.stat_result:
    """Return ``status`` of an ordinary file. Raises OSError for a folder, and for a pipe or device, which may not end."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file")
    return status

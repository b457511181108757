"""C sources as a shared library: compiled once, cached, checked before loading.

The compiler is ``CC``, else ``cc``, and compiles for its own processor. The library is stored in the user's cache
folder as ``cpu-KEY-DIGEST.so``: KEY is a hash of all of its inputs, DIGEST one of the file. It is loaded only if

* its bytes have that digest: a file truncated by a power failure is compiled again, and not mapped, which would crash;
* only this user and root can have put it there: they own it and every folder above it, and others can write to none of
  those. A cache folder that fails this is not used, with one warning. The next candidates are a folder of this user
  under the system's temporary folder, and one of this process.

A file is written under another name, flushed to the disk and renamed, so processes may compile at the same time.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...files.atomic_io import sync
from ...files.terminal import warn_user


def missing_compiler() -> str | None:
    """Why nothing can be compiled; None: a compiler exists. Runs nothing."""
    given = os.environ.get("CC") or "cc"
    words = given.split()
    if words and shutil.which(words[0]) is None:
        return _no_compiler(given)
    return None


def _no_compiler(given: str) -> str:
    return f"no C compiler: {given} is not there; install one or set CC"


def load(sources: Sequence[Path], flags: str) -> tuple[ctypes.CDLL | None, str | None]:
    """(the library of these C sources, None), or (None, why there is none). Their headers are in the same folder."""
    given = os.environ.get("CC") or "cc"
    try:
        compiler = shlex.split(given)
        version = _run([*compiler, "--version"], timeout=60).stdout
    except FileNotFoundError:
        return None, _no_compiler(given)
    except subprocess.CalledProcessError as error:
        return None, f"no C compiler: {given} --version exits with {error.returncode}"
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        return None, f"no C compiler: {given}: {error}"
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    inputs = [*compiler, version, flags, *(path.read_text() for path in (*sources, *headers)), _processor()]
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    try:
        return _find_or_compile(key, [*compiler, *flags.split(), *map(str, sources)]), None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines()
        return None, f"{given} cannot compile the kernels: {lines[0] if lines else error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"kernels not compiled: {error}"


def _run(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Runs a compiler with English messages; CalledProcessError if it fails."""
    return subprocess.run(
        command,
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=timeout,
    )


def _find_or_compile(key: str, command: Sequence[str]) -> ctypes.CDLL:
    """The library from the first folder that has a valid one, or that allows writing and executing."""
    failed: OSError | None = None
    for folder in folders():
        try:
            return ctypes.CDLL(str(_cached_library(folder, key) or _compile(folder, key, command)))
        except OSError as error:  # read-only, full, or mounted noexec
            failed = error
    raise OSError(f"no folder for compiled kernels: {failed}")


def _cached_library(folder: Path, key: str) -> Path | None:
    """The complete library of this key in a folder; None if there is none."""
    for path in sorted(folder.glob(f"cpu-{key}-*.so")):
        if path.is_file() and _foreign_writer(path) is None and path.stem.rpartition("-")[2] == _digest(path):
            return path
    return None


def _compile(folder: Path, key: str, command: Sequence[str]) -> Path:
    """Compiles into a folder. Processes may do so at the same time: each renames a complete file, the last one wins."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    unfinished = Path(name)
    try:
        _run([*command, "-o", name], timeout=300)
        unfinished.chmod(0o755)  # for any umask: a file that others may write is not loaded
        ctypes.CDLL(name)  # a compiler may succeed without a valid library, which is not kept
        sync(unfinished)
        path = folder / f"cpu-{key}-{_digest(unfinished)}.so"
        os.replace(unfinished, path)
        sync(folder)
        return path
    finally:
        unfinished.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# -------------------------------------------------------------------------------------------------------------- folders


def folders() -> Iterator[Path]:
    """Folders for compiled libraries, best first; each exists, and only this user and root can write to it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and a user unknown to the system
        cache = None
    temporary = Path(tempfile.gettempdir(), f"megatron_fp8-{_user()}")
    for folder in (cache and cache / "megatron_fp8", temporary):
        if folder is None:
            continue
        try:
            why, made = private_folder(folder / "kernels")
        except OSError:  # cannot be made here: a read-only or full disk
            continue
        if why is None:
            yield made
        else:
            text = (
                f"compiled kernels are not taken from {folder}, but from a folder of this user alone: {why}"
            )
            warn_user(text, RuntimeWarning)
    alone = tempfile.mkdtemp(prefix="megatron_fp8-")
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    yield Path(alone).resolve()


def private_folder(folder: Path) -> tuple[str | None, Path]:
    """(None, the real path of a folder, created if missing); or (why others could write to it, that path).

    OSError: it cannot be made.
    """
    folder = Path(os.path.realpath(folder))  # the checked path is the used one, after all links
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    why = _writable_by_others(missing[-1] if missing else folder)
    if why is None and missing:
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        why = _writable_by_others(folder)
    return why, folder


def _writable_by_others(folder: Path) -> str | None:
    """Who else than this user and root could put files into a folder, or replace it; None if no one could."""
    for path in (folder, *folder.parents):
        why = _foreign_writer(path) if path.exists() else None
        # In a sticky folder, such as the system's temporary one, users cannot rename other users' files.
        if why is not None and (path == folder or not _sticky(path)):
            return why
    return None


def _foreign_writer(path: Path) -> str | None:
    """Why users other than this one and root could have written a file or folder; None if they could not."""
    if not hasattr(os, "getuid"):  # Windows: a user's folders are the user's
        return None
    found = path.lstat()
    if found.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to another user (number {found.st_uid})"
    if found.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"{path} can be written by its group (number {found.st_gid})"
    return None


def _sticky(path: Path) -> bool:
    found = path.lstat()
    return bool(found.st_mode & stat.S_ISVTX) and found.st_uid in (os.getuid(), 0)


def _is_own_group(number: int) -> bool:
    """Whether only this user is in a group: many systems give each user a group of the same name, with write access."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user() -> int | str:
    return os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def _processor() -> str:
    """The facts on which -march=native depends: different machines may share a home folder."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(named)])

"""C sources as a shared library: compiled once, cached, checked before loading.

The compiler is ``CC``, else ``cc``, and compiles for its own processor. What it makes is kept under the user's cache
folder as ``cpu-KEY-DIGEST.so``: KEY is a hash of all that went into it, DIGEST one of the file. It is loaded only if

* its bytes have that digest, so one that was cut short by a power failure is compiled again, not mapped and crashed on;
* nobody but this user and root can have put it there: they own it and every folder above it, and none of those can be
  written by others. A cache folder that fails this is not used (one warning says so). The next to be tried are a folder
  of this user under the system's temporary folder, and one of this process alone.

A file is written under another name, flushed to the disk and renamed, so processes that compile at once do no harm.
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
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...files.atomic_io import sync


def missing_compiler() -> str | None:
    """Why nothing can be compiled, as far as can be told without running anything; None: a compiler is there."""
    given = os.environ.get("CC") or "cc"
    words = given.split()
    if words and shutil.which(words[0]) is None:
        return _absent(given)
    return None


def _absent(given: str) -> str:
    return f"no C compiler: {given} is not there; install one or set CC"


def load(sources: Sequence[Path], flags: str) -> tuple[ctypes.CDLL | None, str | None]:
    """(the library of these C sources, None), or (None, why there is none). They include headers that lie beside them."""
    given = os.environ.get("CC") or "cc"
    try:
        compiler = shlex.split(given)
        version = _run([*compiler, "--version"], timeout=60).stdout
    except FileNotFoundError:
        return None, _absent(given)
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
    """What a compiler does and says, in English; CalledProcessError if it fails."""
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
    """The library from the first folder that holds a good one, or can be written and run from."""
    failed: OSError | None = None
    for folder in folders():
        try:
            return ctypes.CDLL(str(_kept(folder, key) or _compile(folder, key, command)))
        except OSError as error:  # read-only, full, or mounted so that nothing runs from it
            failed = error
    raise OSError(f"no folder for compiled kernels: {failed}")


def _kept(folder: Path, key: str) -> Path | None:
    """The whole library of this key in a folder; None if there is none."""
    for path in sorted(folder.glob(f"cpu-{key}-*.so")):
        if path.is_file() and _foreign(path) is None and path.stem.rpartition("-")[2] == _digest(path):
            return path
    return None


def _compile(folder: Path, key: str, command: Sequence[str]) -> Path:
    """Compile into a folder. Many processes may do so at once: each renames a whole file, the last one wins."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    unfinished = Path(name)
    try:
        _run([*command, "-o", name], timeout=300)
        unfinished.chmod(0o755)  # whatever the umask: what others may write is not loaded
        ctypes.CDLL(name)  # what a compiler calls done may be no library: that is not kept
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
    except RuntimeError:  # no HOME, and a user that the system does not know
        cache = None
    temporary = Path(tempfile.gettempdir(), f"megatron_fp8-{_user()}")
    for folder in (cache and cache / "megatron_fp8", temporary):
        if folder is None:
            continue
        try:
            why, made = private(folder / "kernels")
        except OSError:  # cannot be made here: a read-only or full disk
            continue
        if why is None:
            yield made
        else:
            text = (
                f"compiled kernels are not taken from {folder}, but from a folder of this user alone: {why}"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=1)
    alone = tempfile.mkdtemp(prefix="megatron_fp8-")
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    yield Path(alone).resolve()


def private(folder: Path) -> tuple[str | None, Path]:
    """(None, the real path of a folder, made if it was not there); or (why others could write to it, that path).

    OSError: it cannot be made.
    """
    folder = Path(os.path.realpath(folder))  # what is checked is what is used, whatever links lead there
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    why = _writable_by_others(missing[-1] if missing else folder)
    if why is None and missing:
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
        why = _writable_by_others(folder)
    return why, folder


def _writable_by_others(folder: Path) -> str | None:
    """Who but this user and root could put files into a folder, or another folder in its place; None if nobody."""
    for path in (folder, *folder.parents):
        why = _foreign(path) if path.exists() else None
        # In a sticky folder, such as the system's temporary one, nobody can rename another user's files.
        if why is not None and (path == folder or not _sticky(path)):
            return why
    return None


def _foreign(path: Path) -> str | None:
    """Why a file or folder may be other than what this user or root put there; None if it cannot."""
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
    """Whether a group is this user's alone: many systems give each user one of the user's name, and let it write."""
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
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(named)])

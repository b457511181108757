"""Limits of this process: files, memory, threads and its locale's encoding."""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import sys
import threading
from contextlib import suppress

RAISE_FILES = "limits.conf, LimitNOFILE of a service, --ulimit nofile of a container"
"""Places, beside the shell, that set a process's limit of open files."""

_OTHER_FILES = 128
"""A lower bound for files, libraries, devices and NCCL's connections: a refused run could not have worked."""
_FILES, _FILES_OF_ALL = os.strerror(errno.EMFILE), os.strerror(errno.ENFILE)
_MEMORY = re.compile("[Cc]an(no|')t allocate memory|std::bad_alloc|failed to map segment")
_THREADS = re.compile(rf"can't start new thread|{os.strerror(errno.EAGAIN)}$")


def limit_reached(error: BaseException | None) -> str | None:
    """The limit of this process that an error, or its cause, has reached, and a remedy; None if there is none.

    Errors of torch and of other ranks are recognised by their texts.
    """
    while error is not None:
        text = str(error)
        if _FILES_OF_ALL in text:
            return "All files that this machine may have open are open: raise fs.file-max (sysctl), or end others."
        if _FILES in text:
            return (
                f"This process may open {_allowed(resource.RLIMIT_NOFILE)} files (`ulimit -n`), and needs more: raise"
                f" that where it is started (`ulimit -n 4096`; {RAISE_FILES})."
            )
        if isinstance(error, MemoryError) or _MEMORY.search(text):
            return f"This process needs more memory than it may have: {_raise_memory()}."
        if isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and _THREADS.search(text)):
            user = _allowed(resource.RLIMIT_NPROC) or "any number"
            of_user = f"its user may have {user} of them (`ulimit -u`), and a container limits them too (--pids-limit)"
            causes = [of_user, f"each takes memory: {_raise_memory()}"]
            if _allowed(resource.RLIMIT_AS):
                causes.reverse()
            return f"This process can start no further thread or process: {'; or '.join(causes)}."
        if isinstance(error, UnicodeError) and (words := locale_limit(getattr(error, "object", ""))):
            return words
        error = error.__cause__ or error.__context__
    return None


def raise_files() -> int:
    """Raise this process's limit of open files as far as allowed; return the new limit."""
    allowed, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports a higher limit than it grants
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        allowed = hard_limit
    return allowed if allowed != resource.RLIM_INFINITY else 2**62


def check_files(ranks: int, *, hosts_store: bool, over_gloo: bool) -> None:
    """Raise the limit of open files; ValueError if this process cannot connect to `ranks` ranks.

    Each connection uses a file. Over gloo each rank connects to every other rank of its group, and checkpoints use a gloo
    group of all ranks. The host of the start-up store has two connections to each rank.

    Args:
        hosts_store: this process hosts the ranks' store.
        over_gloo: training's groups use gloo too.
    """
    allowed, needed = raise_files(), ranks * (1 + 2 * hosts_store + over_gloo) + _OTHER_FILES
    if ranks > 1 and allowed < needed:
        raise ValueError(
            f"this process may open {allowed} files (`ulimit -Hn`), and {ranks} ranks need at least {needed}, as each is"
            f" connected to all others: raise the limit where ranks are started ({RAISE_FILES}), or launch fewer."
        )


def _allowed(limit: int, unit: int = 1) -> str:
    """A limit as text; '' if there is none."""
    allowed, _ = resource.getrlimit(limit)
    return "" if allowed == resource.RLIM_INFINITY else f"{allowed // unit:,}"


def _raise_memory() -> str:
    """A remedy: how this process gets more memory."""
    limits = {"v": _allowed(resource.RLIMIT_AS, 2**20), "d": _allowed(resource.RLIMIT_DATA, 2**20)}
    if finite_limits := [(option, size) for option, size in limits.items() if size]:
        options = " and ".join(f"`ulimit -{option}` allows {size} MiB" for option, size in finite_limits)
        return f"{options}, so raise that where it is started (`ulimit -{finite_limits[0][0]} unlimited`)"
    return "give its job, service or container more (--mem of SLURM, --memory of Docker), or take a larger machine"


def locale_limit(text: str | bytes) -> str | None:
    """Why this process cannot encode a UTF-8 text, and a remedy; None if it can, or if the text is not UTF-8."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8" or not _is_utf8(text):
        return None
    names = ("LC_ALL", "LC_CTYPE", "LANG")
    settings = (
        ", ".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name)) or "no LC_ALL"
    )
    return (
        f"The locale ({settings}) makes this process read and write names as {encoding}, and not as UTF-8: start it with"
        " LC_ALL=C.UTF-8 or PYTHONUTF8=1."
    )


def _is_utf8(text: str | bytes) -> bool:
    """Whether the original bytes of a text are UTF-8."""
    try:
        (text if isinstance(text, bytes) else os.fsencode(text)).decode("utf-8")
    except UnicodeEncodeError:  # a character that the locale cannot encode, not a raw byte
        return True
    except UnicodeDecodeError:
        return False
    return True


def usable_cores() -> int:
    """Number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def check_threads(count: int) -> None:
    """Raise RuntimeError or OSError (see `limit_reached`) if this process cannot start `count` more threads.

    Creating a gloo group hangs for ever if one of its three threads cannot start (seen in torch 2.13).
    """
    if _allowed(resource.RLIMIT_AS):  # Python's threads would also reserve 64 MiB each; gloo's do not
        stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
        mmap.mmap(-1, count * (2**21 if stack == resource.RLIM_INFINITY else stack)).close()
        return
    release, started = threading.Event(), []
    try:
        for _ in range(count):
            thread = threading.Thread(target=release.wait, name="check", daemon=True)
            thread.start()
            started.append(thread)
    finally:
        release.set()
        for thread in started:
            thread.join()

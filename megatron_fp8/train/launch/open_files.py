"""Raises the limit of open files: each connection of a process is one.

Over gloo each rank is connected to each other one of its group (a group of N ranks adds N + 3 open files to each), and
checkpoints are agreed on in a group of all ranks. Whoever keeps the store in which ranks meet has two connections to each
of them. Shells allow 1,024 open files, and mostly allow a process to raise that itself.
"""

from __future__ import annotations

import resource
from contextlib import suppress

from ...files.resource_limits import RAISE_FILES

_OTHERS = 128
"""Files, libraries, devices and NCCL's connections: a process has more, so what is refused could not have run."""


def raise_limit() -> int:
    """Raise the number of files that this process may open as far as it may; that number."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS names a higher one than it gives
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        allowed = most
    return allowed if allowed != resource.RLIM_INFINITY else 2**62


def check_limit(allowed: int, ranks: int, *, keeps_store: bool, over_gloo: bool) -> None:
    """ValueError if a process that may open so many files cannot be connected to so many ranks.

    Args:
        keeps_store: it keeps the store in which the ranks meet.
        over_gloo: training's own groups are gloo's, too.
    """
    needed = ranks * (1 + 2 * keeps_store + over_gloo) + _OTHERS
    if ranks > 1 and allowed < needed:
        raise ValueError(
            f"this process may open {allowed} files (`ulimit -Hn`), and {ranks} ranks need at least {needed}, as each is"
            f" connected to all others: raise the limit where ranks are started ({RAISE_FILES}), or launch fewer."
        )

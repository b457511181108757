"""Raises the limit of open files: each connection uses one.

Over gloo each rank connects to every other rank of its group: a group of N ranks adds N + 3 open files to each rank,
and checkpoints use a group of all ranks. The host of the start-up store has two connections to each rank. Shells allow
1,024 open files, and most allow a process to raise that limit itself.
"""

from __future__ import annotations

import resource
from contextlib import suppress

from ...files.resource_limits import RAISE_FILES

_OTHERS = 128
"""A lower bound for files, libraries, devices and NCCL's connections: a refused run could not have worked."""


def raise_limit() -> int:
    """Raise this process's limit of open files as far as allowed; return the new limit."""
    allowed, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports a higher limit than it grants
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        allowed = hard_limit
    return allowed if allowed != resource.RLIM_INFINITY else 2**62


def check_limit(allowed: int, ranks: int, *, keeps_store: bool, over_gloo: bool) -> None:
    """Raise ValueError if a process with `allowed` open files cannot connect to `ranks` ranks.

    Args:
        keeps_store: this process hosts the ranks' store.
        over_gloo: training's groups use gloo too.
    """
    needed = ranks * (1 + 2 * keeps_store + over_gloo) + _OTHERS
    if ranks > 1 and allowed < needed:
        raise ValueError(
            f"this process may open {allowed} files (`ulimit -Hn`), and {ranks} ranks need at least {needed}, as each is"
            f" connected to all others: raise the limit where ranks are started ({RAISE_FILES}), or launch fewer."
        )

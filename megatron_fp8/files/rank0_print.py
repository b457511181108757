"""Prints messages to the user, on the first rank only."""

from __future__ import annotations

import sys
from typing import Literal

import torch.distributed as dist

from .terminal import printable

_told: set[str] = set()


def print_rank_0(text: str, *, once: bool = False, to: Literal["stderr", "stdout"] = "stderr") -> None:
    """Print ``text`` and flush, on the first rank of a launch (or the only process).

    Args:
        once: print the same text only once in this process: a model has several chunks, a process several models.
        to: 'stdout' for requested output, 'stderr' for other messages.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if once and text in _told:
        return
    if once:
        _told.add(text)
    print(printable(text), file=sys.stderr if to == "stderr" else sys.stdout, flush=True)

"""Prints text to the user: safe for a terminal, and on the first rank only."""

from __future__ import annotations

import sys
from typing import Literal

_printed: set[str] = set()


def printable(text: str) -> str:
    r"""The text with terminal control characters escaped: ``\x1b`` for escape. Line ends and tabs stay.

    Names in reports, checkpoints and directories may come from other users' files.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


def print_rank_0(text: str, *, once: bool = False, to: Literal["stderr", "stdout"] = "stderr") -> None:
    """Print ``text`` and flush, on the first rank of a launch (or the only process).

    Args:
        once: print the same text only once in this process: a model has several chunks, a process several models.
        to: 'stdout' for requested output, 'stderr' for other messages.
    """
    import torch.distributed as dist  # late: commands without torch print, too

    if dist.is_initialized() and dist.get_rank() != 0:
        return
    if once and text in _printed:
        return
    if once:
        _printed.add(text)
    print(printable(text), file=sys.stderr if to == "stderr" else sys.stdout, flush=True)

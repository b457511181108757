"""Prints text to the user: safe for a terminal, and on the first rank only."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal

_printed: set[str] = set()


def printable(text: str) -> str:
    r"""The text with terminal control characters escaped: ``\x1b`` for escape. Line ends and tabs stay.

    Names in reports, checkpoints and directories may come from other users' files.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)


WIDTH = 80
"""Width of texts for a terminal, in characters."""


def wrap(text: str, first: str = "", after: str = "", width: int = WIDTH) -> str:
    """The text in lines of at most ``width``; words stay whole. ``first``, ``after``: indents of the first line and the
    others."""
    wrapper = textwrap.TextWrapper(width, first, after, break_on_hyphens=False, break_long_words=False)
    return wrapper.fill(text)


def number_ranges(numbers: Iterable[int], dash: str = "-", comma: str = ", ") -> str:
    """Increasing numbers as ranges: '0-3, 7'."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return comma.join(str(a) if a == b else f"{a}{dash}{b}" for a, b in found)


def ranks_in_words(ranks: Sequence[int], most: int = 8) -> str:
    """'rank 3', 'ranks 0, 1, 2', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 more'."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:most]))}{more}"


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

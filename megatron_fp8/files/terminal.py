"""Prints lines and warnings to the user."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
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


_LIBRARIES = {"megatron_fp8", "megatron", "torch"}
_LIBRARIES |= {"transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "trl"}
"""Packages whose code calls this package on behalf of the user's."""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line of the user's code: not of this package, a library in between or Python's own.

    In a thread without such a line: at the caller's. A ``stacklevel`` is right for one way to the warning alone, and
    filters by module hide what is attributed to a library.
    """
    caller = sys._getframe(1)
    frame = caller
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    if _is_library(frame):
        frame = caller
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _is_library(frame: FrameType) -> bool:
    # A dataclass' generated __init__ has its module's globals, and no file.
    name = str(frame.f_globals.get("__name__")).partition(".")[0]
    return name in _LIBRARIES or name in sys.stdlib_module_names

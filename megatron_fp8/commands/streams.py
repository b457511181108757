"""Replaces closed standard streams (`>&-`, some daemons and cron jobs) by the null device.

Python has None for such a stream, and the next file or socket that is opened gets its number: what a library writes to
number 2 would then go into a connection between ranks.
"""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed() -> None:
    """Open /dev/null in the place of each of the three that is closed; child processes have it, too."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number and not _is_open(number):  # else something has its number by now
            os.dup2(nowhere, number)
            os.close(nowhere)
            nowhere = number
        os.set_inheritable(nowhere, True)
        stream = os.fdopen(nowhere, mode, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True

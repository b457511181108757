"""Replaces closed standard streams (`>&-`, some daemons and cron jobs) by the null device.

Python has None for such a stream, and the next opened file or socket gets its number: a library's output to number 2
would then go into a connection between ranks.
"""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Open /dev/null in place of each closed standard stream, for child processes too."""
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        null_device = os.open(os.devnull, os.O_RDWR)
        if null_device != number and not _is_open(number):  # else the number is in use by now
            os.dup2(null_device, number)
            os.close(null_device)
            null_device = number
        os.set_inheritable(null_device, True)
        stream = os.fdopen(null_device, mode, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True

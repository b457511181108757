"""Runs a program that ends with its parent: python -I -S tied.py PARENT PROGRAM ARGUMENT...

Linux then sends the program SIGTERM when PARENT dies, of SIGKILL too; a training saves and ends. It is asked for here,
in a process of its own that becomes the program, because whoever starts ranks offers no moment for it. Elsewhere programs
are started as they are.
"""

import os
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_SIGTERM = 15


def tied(command: list[str]) -> list[str]:
    """The command line that starts `command` (a program's path and its arguments) as a child tied to this process."""
    if not sys.platform.startswith("linux"):
        return command
    # This very interpreter; without site-packages it starts in 20 ms.
    return [os.path.realpath("/proc/self/exe"), "-I", "-S", __file__, str(os.getpid()), *command]


def _become(parent: int, command: list[str]) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before that
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    _become(int(sys.argv[1]), sys.argv[2:])

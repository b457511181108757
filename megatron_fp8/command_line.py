"""What all commands share: exit codes, a parser, and bad input as one line on stderr."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import NoReturn

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2


class CommandParser(argparse.ArgumentParser):
    """The options of ``megatron-fp8 COMMAND``, --debug among them. Bad ones raise ValueError; the process goes on."""

    def __init__(self, command: str, description: str):
        super().__init__(
            prog=f"megatron-fp8 {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--debug", action="store_true", help="show tracebacks of bad input")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. {self.prog} --help says more.")


def refuse(error: Exception, *, debug: bool = False) -> int:
    """Say in one line what is wrong, after its traceback if ``debug``; the exit code of bad input."""
    if debug:
        traceback.print_exception(error)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT

"""What all commands share: exit codes, a parser, and bad input as one line on stderr."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
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


def refuse(
    error: Exception,
    *,
    debug: bool = False,
    tell: Callable[[int, str, Callable[[], None]], None] = lambda code, line, say: say(),
    code: int = EXIT_BAD_INPUT,
) -> int:
    """Say in one line what is wrong, after its traceback if ``debug``; returns the exit code.

    Args:
        tell: given (exit code, line, how to say it), tells other ranks, and has one of those that refuse say it.
    """
    line = f"error: {' '.join(str(error).split())}"

    def say() -> None:
        if debug:
            traceback.print_exception(error)
        print(line, file=sys.stderr, flush=True)

    tell(code, line, say)
    return code

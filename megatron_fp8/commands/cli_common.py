"""Shared by all commands: a parser, and errors as one line on stderr."""

from __future__ import annotations

import argparse
import difflib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from ..files.resource_limits import limit_reached
from ..files.terminal import printable
from ..train.failure import EXIT_BAD_INPUT, EXIT_DONE
from .help_format import fit_help

T = TypeVar("T")
_LONGEST = 1500
"""Longest line in characters, before escapes."""


class CommandParser(argparse.ArgumentParser):
    """The options of ``megatron-fp8 COMMAND``, including --debug. Bad options raise ValueError.

    Args:
        other_words: names of an option in other programs, with '_' and without leading '-' -> the option.
    """

    def __init__(self, command: str, description: str, other_words: Mapping[str, str] = MappingProxyType({})):
        super().__init__(
            prog=f"megatron-fp8 {command}",
            description=fit_help(description),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._other_words = other_words
        self.add_argument("--debug", action="store_true", help="show tracebacks of bad input")

    def parse(self, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """(options, further arguments of the command)."""
        return self.parse_args(arguments), []

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; the error for an unknown option names the nearest known one."""
        options, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}{self.near(rest[0])}")
        return options

    def near(self, argument: str) -> str:
        """'. Did you mean ...?' for an unknown option similar to a known one; else ''."""
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            return ""
        translated = self._other_words.get(name.lstrip("-").replace("-", "_"))
        near = (
            [translated] if translated else difflib.get_close_matches(name, self._option_string_actions, n=1)
        )
        return f". Did you mean {near[0]}?" if near else ""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}{'' if message.endswith('?') else '.'} {self.prog} --help says more.")


def warn_in_lines() -> None:
    """Print this package's warnings as one line each, and hide those of libraries."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)(\.|$)")
    warnings.formatwarning = lambda message, *_, **__: f"warning: {printable(str(message))}\n"


def refuse(
    error: Exception,
    *,
    debug: bool = False,
    tell: Callable[[int, str, Callable[[], None]], None] = lambda code, line, say: say(),
    code: int = EXIT_BAD_INPUT,
) -> int:
    """Print an error in one line, with the limit that caused it and, if ``debug``, its traceback; return the exit code.

    Args:
        tell: takes (exit code, line, a function that prints the line); with several ranks it informs the others, and
        lets
            one rank print.
    """
    text = " ".join(str(error).split())
    if limit := limit_reached(error):
        text = f"{text.rstrip('.')}. {limit}" if text else limit
    if len(text) > _LONGEST:  # it may quote another user's file
        text = f"{text[: _LONGEST // 2]} [...] {text[-_LONGEST // 2 :]}"
    line = printable(f"error: {text}")

    def say() -> None:
        if debug:
            traceback.print_exception(error)
        print(line, file=sys.stderr, flush=True)

    tell(code, line, say)
    return code


def run(parser: CommandParser, arguments: list[str], work: Callable[[argparse.Namespace], None]) -> int:
    """Parse the options, call ``work(options)``, return the exit code. ValueError means bad input."""
    warn_in_lines()
    try:
        work(parser.parse_args(arguments))
    except ValueError as error:
        return refuse(error, debug="--debug" in arguments)
    return EXIT_DONE


def tensors_shown(items: Iterable[T], count: int) -> Iterator[T]:
    """The items, with a progress bar on a terminal."""
    from rich.progress import track

    if not sys.stderr.isatty():
        return iter(items)
    from rich.console import Console

    return iter(track(items, total=count, console=Console(stderr=True), description="tensors"))

"""JSON Lines files of runs, with tolerance for edits and half-written lines.

Commands that show a run use `read_lines`, which raises an error with the number of a wrong line. A resumed run uses
`records_until`, which skips such lines and reports them: a damaged record must not end a training.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .atomic_io import open_ordinary
from .strict_json import load_json

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LAST_EXACT = 2**53
"""JavaScript represents whole numbers exactly up to here."""


class WrongLine(ValueError):
    """An invalid line. ``what``: which line and why, without the remedy."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: correct it or remove the line.")
        self.what = what


class Line:
    """One object of a file, with path and line number for error messages."""

    def __init__(self, path: Path, number: int, content: dict[str, Any]) -> None:
        self.path, self.number, self.content = path, number, content

    def wrong(self, problem: str) -> WrongLine:
        """The error to raise, with file and line number."""
        return WrongLine(f"line {self.number} of {str(self.path)!r} {problem}")

    def iteration(self, first: int = 0) -> int:
        """Its iteration. Raises ValueError unless that is a whole number from ``first`` on."""
        value = self.content.get("iteration")
        if isinstance(value, bool) or not isinstance(value, int) or not first <= value < _LAST_EXACT:
            raise self.wrong(f"has the iteration {_short(value)}, and that is a whole number from {first} on")
        return value

    def text(self, name: str) -> str:
        """A text field. Raises ValueError if it is not text."""
        value = self.content.get(name)
        if not isinstance(value, str):
            raise self.wrong(f"has {name} {value!r}, and that is a text")
        return value

    def texts(self, name: str) -> list[str]:
        """A field with a list of texts, empty if it is missing. Raises ValueError for other types."""
        values = self.content.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong(f"has {name} {_short(values)}, and that is a list of texts")
        return values

    def number_of(self, name: str) -> float | None:
        """A field with a number, NaN, infinity or null; NaN and infinities may be strings. Else ValueError."""
        value = self.content[name]
        if value is None:
            return None
        if isinstance(value, str) and value in _WORDS:
            return _WORDS[value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"has {name} {_short(value)}, and that is a number")
        try:
            return float(value)
        except OverflowError:  # an integer beyond float64's range
            return math.inf if value > 0 else -math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."


def read_lines(path: Path) -> Iterator[Line]:
    """The objects of a file, in order; an incomplete last line, of a run that was killed, is skipped.

    A missing file yields nothing. Raises ValueError if the file cannot be read or is not ordinary, or if a line is not
    a JSON object.
    """
    try:
        stream = open_ordinary(path, sys.maxsize)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}).") from error
    with stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield Line(path, number, _parse(path, number, line))


def unfinished(path: Path) -> bool:
    """Whether a file's last line is incomplete; ``read_lines`` skips it."""
    try:
        with open_ordinary(path, sys.maxsize) as stream:
            if not stream.seek(0, os.SEEK_END):
                return False
            stream.seek(-1, os.SEEK_END)
            return stream.read(1) != b"\n"
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}).") from error


def records_until(
    path: Path, finished: int, first: int = 0
) -> tuple[list[tuple[bytes, dict[str, Any]]], list[str]]:
    """Lines and objects of a run's first ``finished`` iterations, and a description of each wrong line.

    A wrong line is not a JSON object, or its iteration is not a whole number from ``first`` on. A missing file has no
    lines. Raises OSError.
    """
    lines: list[tuple[bytes, dict[str, Any]]] = []
    wrong: list[str] = []
    if finished and path.is_file():
        complete = path.read_bytes().rpartition(b"\n")[0]
        for number, line in enumerate(complete.split(b"\n") if complete else [], 1):
            try:
                record = _parse(path, number, line)
                if Line(path, number, record).iteration(first) <= finished:
                    lines.append((line, record))
            except WrongLine as error:
                wrong.append(error.what)
    return lines, wrong


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    position = Line(path, number, {})
    try:
        content = load_json(line)
    except ValueError as error:
        raise position.wrong(f"is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise position.wrong("is no JSON object")
    return content

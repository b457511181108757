"""JSON Lines files of runs, with tolerance for edits and half-written lines.

Whoever shows a run reads it with `read_lines`, which names the line that is wrong. A run that goes on reads with
`records_until`, which passes over such lines and says which: a damaged record is no reason to lose a training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .disk import ordinary
from .strict_json import load_json

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_LAST_EXACT = 2**53
"""Iterations up to here are whole numbers in JavaScript too."""


class WrongLine(ValueError):
    """A line cannot be understood. ``what``: which one and why, without the remedy."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: correct it or remove the line.")
        self.what = what


class Line:
    """One object of a file, and where it stands: what is wrong with it is said with the file and the line's number."""

    def __init__(self, path: Path, number: int, content: dict[str, Any]) -> None:
        self.path, self.number, self.content = path, number, content

    def wrong(self, problem: str) -> WrongLine:
        """The error to raise."""
        return WrongLine(f"line {self.number} of {str(self.path)!r} {problem}")

    def iteration(self, first: int = 0) -> int:
        """Its iteration; ValueError if that is no whole number from ``first`` on."""
        value = self.content.get("iteration")
        if isinstance(value, bool) or not isinstance(value, int) or not first <= value < _LAST_EXACT:
            raise self.wrong(f"has the iteration {_short(value)}, and that is a whole number from {first} on")
        return value

    def text(self, name: str) -> str:
        """A field that is text; ValueError if it is not."""
        value = self.content.get(name)
        if not isinstance(value, str):
            raise self.wrong(f"has {name} {value!r}, and that is a text")
        return value

    def texts(self, name: str) -> list[str]:
        """A field that is a list of texts, empty where it is missing; ValueError if it is something else."""
        values = self.content.get(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.wrong(f"has {name} {_short(values)}, and that is a list of texts")
        return values

    def number_of(self, name: str) -> float | None:
        """A field that is a number, NaN, an infinity or null; these may be in words. Else ValueError."""
        value = self.content[name]
        if value is None:
            return None
        if isinstance(value, str) and value in _WORDS:
            return _WORDS[value]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"has {name} {_short(value)}, and that is a number")
        try:
            return float(value)
        except OverflowError:  # an integer beyond float64
            return math.inf if value > 0 else -math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."


def read_lines(path: Path) -> Iterator[Line]:
    """The objects of a file in its order; an unfinished last line, of a run that was killed, is left out.

    No file: nothing. ValueError: it cannot be read, is no ordinary file, or a line is no JSON object.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}).") from error
    try:
        ordinary(os.fstat(handle))
    except OSError as error:
        os.close(handle)
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}).") from error
    with open(handle, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield Line(path, number, _parsed(path, number, line))


def unfinished(path: Path) -> bool:
    """Whether the last line of a file has no end, which ``read_lines`` leaves out."""
    try:
        ordinary(path.stat())
        with path.open("rb") as stream:
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
    """Lines and their objects, of a run's first ``finished`` iterations; and what is wrong with each whole line that is
    no record: no JSON object, or its iteration is no whole number from ``first`` on.

    No file: none. Raises OSError.
    """
    found: list[tuple[bytes, dict[str, Any]]] = []
    wrong: list[str] = []
    if finished and path.is_file():
        whole = path.read_bytes().rpartition(b"\n")[0]
        for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
            try:
                record = _parsed(path, number, line)
                if Line(path, number, record).iteration(first) <= finished:
                    found.append((line, record))
            except WrongLine as error:
                wrong.append(error.what)
    return found, wrong


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    at = Line(path, number, {})
    try:
        content = load_json(line)
    except ValueError as error:
        raise at.wrong(f"is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise at.wrong("is no JSON object")
    return content

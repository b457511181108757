"""Files of a run's records, JSON Lines and TensorBoard events: read strictly, appended safely.

Commands that show a run use `read_lines`, which raises an error with the number of a wrong line. A resumed run uses
`records_until`, which skips such lines and reports them: a damaged record must not end a training.

A full disk does not end it either. Data that cannot be written stays in memory and is written before the next record,
from the byte at which writing stopped. One warning reports the first failure, and ``close`` returns what is lost for
good, for a warning at the run's end. A killed process leaves at most one incomplete record, the last. Before each record
the file's path is checked: if the file was removed, moved or replaced (`mv`, logrotate, an editor), later records go to
the new file, and the loss is reported at the end.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .atomic_io import open_regular
from .strict_json import load_json
from .terminal import warn_user

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
        stream = open_regular(path, sys.maxsize)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read ({error.strerror}).") from error
    with stream:
        for number, line in enumerate(stream, 1):
            if line.endswith(b"\n"):
                yield Line(path, number, _parse(path, number, line))


def has_incomplete_line(path: Path) -> bool:
    """Whether a file's last line is incomplete; ``read_lines`` skips it."""
    try:
        with open_regular(path, sys.maxsize) as stream:
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


class RecordFile:
    """A file to which each record is appended at once. Raises OSError only when it is made."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, b""
        self._warned, self._moved = False, False
        self._lost = 0
        self._file: int | None = self._open_file()
        self._length = os.fstat(self._file).st_size

    def write(self, record: bytes) -> int:
        """Append a record, after data that is still pending; return its length."""
        assert self._file is not None, "it was closed"
        self._waiting += record
        try:
            self._follow(self._file)
            while self._waiting:
                count = os.write(self._file, self._waiting)
                self._waiting, self._length = self._waiting[count:], self._length + count
        except OSError as error:
            self._warn(error)
        return len(record)

    def _open_file(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def _follow(self, file: int) -> None:
        """Switch to the file at the path, if that is another file, is missing, or was truncated."""
        own = os.fstat(file)
        try:
            current = os.stat(self._path)
        except FileNotFoundError:
            current = None
        same = current is not None and (current.st_dev, current.st_ino) == (own.st_dev, own.st_ino)
        if same and own.st_size >= self._length:
            return
        if not self._moved:
            warn_user(
                f"{str(self._path)!r} was removed, replaced or cut while it was written: records go on in what is there"
                " now."
            )
        self._moved = True
        length = current.st_size if current else 0
        self._lost, self._length = self._lost + max(0, self._length - length), length
        if not same:
            self._file = self._open_file()
            os.close(file)

    def close(self) -> list[str]:
        """Try once more to write pending data, and close; return a line for each loss."""
        if self._file is None:
            return []
        self.write(b"")
        file, self._file = self._file, None
        try:
            os.close(file)
        except OSError as error:
            self._warn(error)
        lacks = {"its last": len(self._waiting), "what was removed from it,": self._lost}
        return [f"{str(self._path)!r} lacks {what} {size} bytes" for what, size in lacks.items() if size]

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            warn_user(
                f"{str(self._path)!r} cannot be written ({error.strerror}): training goes on, and what is missing is"
                " added when it can be."
            )
        self._warned = True


class EventFile:
    """Scalars for TensorBoard, in an event file of its own.

    TensorBoard frames the records. Rejected: its writer of files, a thread that dies with a traceback when the disk is
    full.

    Args:
        folder: created if it does not exist.
        first: the first step to be written: TensorBoard hides earlier files' values from there on. 0: hides none.
    """

    def __init__(self, folder: Path, first: int = 0) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        number = sum(1 for _ in folder.glob(f"{name}.*"))
        self._file = RecordFile(folder / f"{name}.{number}")
        self._records, self._event = RecordWriter(self._file), event_pb2.Event
        self._add(file_version="brain.Event:2")
        if first:
            self._add(step=first, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Record named values of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        entries = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=Summary(value=entries))

    def close(self) -> list[str]:
        """Close the file; return a line for each loss."""
        return self._file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def warn_missing(lacking: list[str]) -> None:
    """Warn in one line of what closed files lack, if anything."""
    if lacking:
        warn_user(f"records are lost: {', '.join(lacking)}. Checkpoints do not need them.")


def continue_file(path: Path, finished: int, first: int = 0, each: range = range(0)) -> RecordFile:
    """Open a .jsonl file after its records of iterations ``first`` to ``finished``; the rest of its content is dropped.

    Invalid lines, such as a full disk leaves, are dropped with a warning. Another warning follows if an iteration in
    ``each``, which should have a record, has none. Raises OSError.
    """
    lines, wrong = records_until(path, finished, first)
    if wrong:
        more = f", and so are {len(wrong) - 1} more that are no records" if wrong[1:] else ""
        warn_user(f"{wrong[0]}: it is dropped{more}.")
    if missing := sorted(set(each).difference(record["iteration"] for _, record in lines)):
        warn_user(
            f"{str(path)!r} has no record of {len(missing)} of the iterations {each[0]} to {each[-1]}, which are done,"
            f" the first of them {missing[0]}: if it was cut, replaced or removed, put it back and start again."
        )
    if path.is_symlink():
        warn_user(
            f"{str(path)!r} is a link to {os.readlink(path)!r}: the run goes on in a file of its own, and what the link"
            " leads to stays as it is."
        )
    # Atomic: a run that is killed here has the old file or the new one.
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(b"".join(line + b"\n" for line, _ in lines))
    temporary.replace(path)
    return RecordFile(path)

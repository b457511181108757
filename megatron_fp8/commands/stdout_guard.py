"""Standard output on a full disk: lost output is reported once, work continues.

A training is worth more than its log. The exit code shows that output was lost. If the reader of standard output ends,
a command ends too (BrokenPipeError); a training saves first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any


class _Stream:
    """A text stream that passes write errors to a function instead of raising them."""

    def __init__(self, stream: Any, fails: Callable[[OSError], None]) -> None:
        self._stream, self._fails = stream, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or drop text that cannot be written. Returns the number of characters."""
        with self._errors_passed_on():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._errors_passed_on():
            self._stream.flush()

    @contextmanager
    def _errors_passed_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fails(error)


@contextmanager
def reader_may_leave(left: Callable[[], None]) -> Iterator[None]:
    """Context: ``left`` is called when the reader of standard output has ended, as `| head`, or a `tee` at Ctrl-C.

    Later output is discarded.
    """
    out: Any = sys.stdout

    def fails(error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            raise error
        _discard(out)
        left()

    with redirect_stdout(_Stream(out, fails)):
        yield


def open_closed_streams() -> None:
    """The null device in place of each standard stream that was closed at the start (`>&-`): Python has None for it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            # With the stream's own number, and for child processes too: their first file would get it, and their errors.
            null = os.open(os.devnull, os.O_RDWR)  # the smallest number that is free
            os.set_inheritable(null, null == number)
            stream = os.fdopen(null, mode)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class Output:
    """Guards sys.stdout and sys.stderr. `lost`: some output could not be written."""

    def __init__(self) -> None:
        self.lost = False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Context: both streams without write errors; at the end unwritable output is dropped, also at Python's exit."""
        out, err = sys.stdout, sys.stderr
        stderr: Any = _Stream(err, lambda error: self._mark_lost())
        stdout: Any = _Stream(out, lambda error: self._report(error, stderr))
        try:
            with redirect_stdout(stdout), redirect_stderr(stderr):
                yield
                stdout.flush()
        finally:
            if self.lost:
                for stream in (out, err):
                    _discard(stream)

    def _mark_lost(self) -> None:
        self.lost = True

    def _report(self, error: OSError, stderr: Any) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        if not self.lost:
            self.lost = True
            print(
                f"error: output cannot be written ({error.strerror}): send it where there is room.",
                file=stderr,
                flush=True,
            )


def _discard(stream: Any) -> None:
    """Flush a stream; if that fails, discard its buffer."""
    try:
        stream.flush()
    except OSError:
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)

"""Standard output on a full disk: lost output is reported once, work goes on.

A training is worth more than its log. The exit code says that something was lost. A reader of standard output that leaves
ends a command (BrokenPipeError), but not a training, which saves first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any


class _Stream:
    """A stream of text whose failures to write are handed on once, in place of being raised."""

    def __init__(self, stream: Any, fails: Callable[[OSError], None]) -> None:
        self._stream, self._fails = stream, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write; what cannot be written is dropped. Returns the number of characters."""
        with self._forgiven():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._forgiven():
            self._stream.flush()

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._fails(error)


@contextmanager
def reader_may_leave(left: Callable[[], None]) -> Iterator[None]:
    """Meanwhile ``left`` is called when whoever reads standard output has left, as `| head` does and a `tee` that Ctrl-C
    ends; what is printed from then on goes nowhere."""
    out: Any = sys.stdout

    def fails(error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            raise error
        _give_up(out)
        left()

    with redirect_stdout(_Stream(out, fails)):
        yield


class Output:
    """sys.stdout and sys.stderr while it is entered. `lost`: something could not be written."""

    def __init__(self) -> None:
        self.lost = False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Both streams, forgiving; at the end what still cannot be written is given up, also by Python's own exit."""
        out, err = sys.stdout, sys.stderr
        stderr: Any = _Stream(err, lambda error: self._lose())
        stdout: Any = _Stream(out, lambda error: self._say(error, stderr))
        try:
            with redirect_stdout(stdout), redirect_stderr(stderr):
                yield
                stdout.flush()
        finally:
            if self.lost:
                for stream in (out, err):
                    _give_up(stream)

    def _lose(self) -> None:
        self.lost = True

    def _say(self, error: OSError, stderr: Any) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        if not self.lost:
            self.lost = True
            print(
                f"error: output cannot be written ({error.strerror}): send it where there is room.",
                file=stderr,
                flush=True,
            )


def _give_up(stream: Any) -> None:
    """Let what a stream still holds go nowhere, if it cannot be written."""
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

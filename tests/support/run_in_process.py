"""A command in this process, as a person meets it: it does its work, or says in one line what is wrong."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from megatron_fp8.commands.main import main
from tests.support.process_monitor import watched
from tests.support.process_state import put_back

LONGEST_S = 20.0
"""Without a word, before whoever waits thinks of a hang."""


@dataclass(frozen=True)
class Heard:
    """The exit code, and what was said."""

    code: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """The line of an exit code of 2, without 'error: '; empty if the work was done."""
        return self.err.splitlines()[-1].removeprefix("error: ") if self.code else ""


def heard(*arguments: object) -> Heard:
    """`megatron-fp8 ARGUMENTS`, whatever comes of it; this process is as before afterwards."""
    out, err = _stream("strict"), _stream("backslashreplace")
    with (
        put_back(),
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:  # after --help
            code = end.code if isinstance(end.code, int) else 1
    return Heard(code, _text(out), _text(err))


def _stream(errors: str) -> io.TextIOWrapper:
    """As stdout and stderr are where UTF-8 is: a name that is none can be written to the second alone."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def _waited() -> float:
    """Seconds for which this thread was ready and others had the cores; 0 where the system does not say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def done_or_refused(*arguments: object) -> Heard:
    """AssertionError unless the command is done (0) or refuses in one line (2), in time, and runs no stranger's code."""
    start, waited = time.monotonic(), _waited()
    with watched() as seen:
        found = heard(*arguments)
    seconds = time.monotonic() - start - (_waited() - waited)
    said = f"exit code {found.code} after {seconds:.1f} s of {arguments}:\n{found.err}"
    ended = (0, 1, 2) if arguments[0] == "parity" else (0, 2)  # 1: it found a difference
    assert found.code in ended and seconds < LONGEST_S, said
    assert "Traceback" not in found.err, said
    assert not seen, f"{seen} in {said}"
    errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == (found.code == 2), said
    if errors:
        assert found.err.endswith(f"{errors[0]}\n") and len(errors[0]) < 2000 and errors[0].isprintable(), (
            said
        )
    return found

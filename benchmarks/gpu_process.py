"""A process whose events are read as they come, whose output goes to a log, and which ends when its time is over."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.gpu_environment import ROOT

OUTPUT_LINES = 30


class Process:
    """A command in a process group of its own, to which a descriptor for its events is added as last argument.

    until: a time.monotonic(), moved by whoever reads events; what still runs then is late. Leaving the context ends the
    process and all that it started.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]):
        self.until = 0.0
        self._log = log
        self._events, told = os.pipe()
        with log.open("ab") as output:
            self._begins = output.tell()
            # A group, and no session of its own: what ends the whole job ends it too.
            self._popen = subprocess.Popen(
                [*command, str(told)],
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[told],
                preexec_fn=os.setpgrp,
            )
        os.close(told)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        os.close(self._events)

    @property
    def late(self) -> bool:
        """Whether it still runs."""
        return self._popen.poll() is None

    def events(self) -> Iterator[dict[str, Any]]:
        """What it tells, until it has ended or its time is over."""
        pending = b""
        while True:
            ended = self._popen.poll() is not None
            wait = 0.0 if ended else min(0.2, self.until - time.monotonic())
            if wait < 0:
                return
            readable, _, _ = select.select([self._events], [], [], wait)
            data = os.read(self._events, 1 << 16) if readable else b""
            *lines, pending = (pending + data).split(b"\n")
            yield from map(json.loads, lines)
            if ended and not data:
                return
            if readable and not data:  # it has closed its end and is about to end
                time.sleep(0.02)

    def end(self) -> str:
        """Kill what still runs of it; how it ended: 'exit code 1', 'SIGSEGV', ..."""
        if self._popen.poll() is None:
            self._kill()
            return "SIGKILL, from outside"
        self._kill()  # what it started may have outlived it
        code = self._popen.returncode
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it: nobody can end it then
            self._popen.wait(10)

    def output(self) -> list[str]:
        """The last lines of what it wrote."""
        with self._log.open("rb") as log:
            log.seek(max(self._begins, log.seek(0, os.SEEK_END) - (1 << 16)))
            lines = log.read().decode(errors="replace").splitlines()
        return [line[:400] for line in lines if line.strip()][-OUTPUT_LINES:]

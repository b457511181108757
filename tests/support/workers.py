"""Runs the collected tests in several processes: whole files, in their order, the next one to whoever is free.

`--workers N`. One process more has the files that are marked `waits`, one after another: most of their time a core is
free. Tests are imported and collected once, half a minute of a core; the processes are forked from the one that
has them, which itself runs none, reports, and forks another one if a process dies. Nothing may have started a thread of
OpenMP by then: no forked process would find it (tests/conftest.py).
"""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections import deque
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from benchmarks.support.room import with_room
from tests.support.order import file_of

Items = list[int]
"""Places in the list of collected tests, of one file or what is left of it."""
Files = deque[Items]


def run(session: pytest.Session, count: int) -> None:
    """Run all tests. Raises as pytest's own loop does (`-x`, Ctrl-C)."""
    session.config._tmp_path_factory.getbasetemp()  # one folder for all processes
    places = range(len(session.items))
    waiting: Files = deque()
    working: Files = deque()
    for _, group in groupby(places, lambda place: file_of(session.items[place].nodeid)):
        items = [*group]
        (waiting if session.items[items[0]].get_closest_marker("waits") else working).append(items)
    workers: list[Worker] = []
    try:
        while waiting or working or workers:
            for files, most in ((waiting, 1), (working, count)):
                while files and sum(worker.files is files for worker in workers) < most:
                    workers.append(Worker(session, workers, files))
            for worker in wait(workers):
                assert isinstance(worker, Worker)
                if worker.listen():
                    continue
                workers.remove(worker)
                if left := worker.ended():
                    worker.files.appendleft(left)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.kill()


class Worker:
    """A process that runs tests of these files, the next one that is left each time, as its parent sees it."""

    def __init__(self, session: pytest.Session, others: list[Worker], files: Files) -> None:
        items = files.popleft()
        self.session, self.files, self.left = session, files, deque(items)
        self.running: pytest.Item | None = None
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            for worker in (*others, self):  # a pipe ends when all who have it let go of it
                worker.connection.close()
            _work(session, theirs, items)
        theirs.close()

    def fileno(self) -> int:
        """Of what `wait` waits for."""
        return self.connection.fileno()

    def listen(self) -> bool:
        """Take what it says; False if it is gone."""
        try:
            kind, said = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return False
        hook, config = self.session.config.hook, self.session.config
        if kind == "starts":
            self.running = self.session.items[self.left.popleft()]
        elif kind == "wants":
            following = self.files.popleft() if self.files else []
            self.left.extend(following)
            self.connection.send(following)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=config, data=said)
            hook.pytest_runtest_logreport(report=report)
        elif kind == "warning":
            category = type(said["category"], (Warning,), {})
            message = warnings.WarningMessage(said["text"], category, said["file"], said["line"])
            told = {name: said[name] for name in ("when", "nodeid", "location")}
            hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": message, **told})
        return True

    def ended(self) -> Items:
        """What it leaves to others. The test in which it died has failed."""
        self.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code or self.left:
            assert self.running is not None, f"a process of tests ended with {code} before its first test"
            why = f"the process of this test ended with {code}"
            report = pytest.TestReport(
                self.running.nodeid, self.running.location, {}, "failed", why, "call", sections=[]
            )
            self.session.config.hook.pytest_runtest_logreport(report=report)
        return list(self.left)

    def kill(self) -> None:
        """End it, with what it runs."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


# ------------------------------------------------------------------------------------------------- in a forked process


def _work(session: pytest.Session, connection: Connection, items: Items) -> None:
    """Run these, then what the parent gives; never returns."""
    code = 1
    try:
        plugins = session.config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the other processes
        capture.start_global_capturing()
        speaker = Speaker(session.config, connection)
        plugins.unregister(name="terminalreporter")
        plugins.register(speaker, "terminalreporter")  # which repeats the warnings that came before
        speaker.warns = True
        while items:
            items = with_room(_run_file, session, speaker, items)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_file(session: pytest.Session, speaker: Speaker, items: Items) -> Items:
    """Run them; those of the next file, which is asked for before the last test: what it takes down depends on it."""
    following: Items = []
    for place, after in zip(items, [*items[1:], None], strict=True):
        if after is None:
            following = speaker.asks()
            after = following[0] if following else None
        item, nextitem = session.items[place], None if after is None else session.items[after]
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    return following


class Speaker:
    """A plugin in place of pytest's reporter, which tells the parent what happens."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self.config, self.connection, self.warns = config, connection, False
        self._tw = config.get_terminal_writer()  # there pytest-timeout looks for it

    def asks(self) -> Items:
        """The next file's tests; none if there is no more."""
        self.connection.send(("wants", None))
        return self.connection.recv()

    def pytest_runtest_logstart(self) -> None:
        self.connection.send(("starts", None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if not self.warns:
            return
        said = {"text": str(warning_message.message), "category": warning_message.category.__name__}
        place = {"file": warning_message.filename, "line": warning_message.lineno}
        self.connection.send(
            ("warning", {**said, **place, "when": when, "nodeid": nodeid, "location": location})
        )

"""The time limit of tests by one thread a process; pytest-timeout starts a thread for each test, and waits for its end.

Of 10,000 tests these are 20,000 switches between threads, which take milliseconds each where all cores are busy. What is
said and done when a test runs past its limit is pytest-timeout's, up to LOOK_S later.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
import pytest_timeout

LOOK_S = 1.0


class TimeLimits:
    """A plugin: pytest-timeout's two hooks, where its method is a thread."""

    def __init__(self) -> None:
        self._watched_in = 0
        self._due: tuple[float, pytest.Item, Any] | None = None

    @pytest.hookimpl
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        if settings.method != "thread":
            return None
        if self._watched_in != os.getpid():  # a forked process has no thread but its first
            threading.Thread(target=self._watch, name="time limits", daemon=True).start()
            self._watched_in = os.getpid()
        self._due = (time.monotonic() + settings.timeout, item, settings)
        return True

    @pytest.hookimpl
    def pytest_timeout_cancel_timer(self) -> bool | None:
        was, self._due = self._due, None
        return True if was else None

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            due = self._due
            if due and time.monotonic() > due[0]:
                pytest_timeout.timeout_timer(*due[1:])  # ends the process

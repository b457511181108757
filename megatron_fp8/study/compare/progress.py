"""Progress of a comparison: a bar or lines."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Progress of all runs in iterations: a bar on a terminal, otherwise lines for the first iteration, each tenth and
    the last."""

    def __init__(self, iterations: int) -> None:
        self._left, self._done, self._trained = iterations, 0, 0
        self._start = self._began = time.monotonic()
        self._name, self._of, self._tenth, self._at = "", 0, 0, 0
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = Bar(
                *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)
            )
            self._task = self._bar.add_task("", total=iterations)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, name: str, which: str, iterations: int, there: int) -> None:
        """Start of a run.

        Args:
            which: '2 of 6'.
            iterations: of the whole run.
            there: iterations already in its folder.
        """
        self._name, self._of, self._began = name, iterations, time.monotonic()
        self._tenth, self._at = 10 * there // iterations, there
        if self._bar is not None:
            self._bar.update(self._task, description=f"{name} ({which})")
        else:
            self.say(f"training {name} ({which})")

    def at(self, iterations: int) -> None:
        """Number of iterations the run has finished."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done + iterations)
            return
        took = _minutes(time.monotonic() - self._began)
        if self._at == 0 and iterations and self._of > 1:
            self.say(f"{self._name}: it started, {took}")
        elif self._at < iterations == self._of:
            self.say(f"{self._name}: all iterations, {took}; the last validation and saving follow")
        self._at = iterations
        before, self._tenth = self._tenth, 10 * iterations // self._of
        if before < self._tenth < 10:
            self.say(f"{self._name}: {iterations} of {self._of} iterations, {took}")

    def end(self, trained: int) -> None:
        """End of a run. ``trained``: iterations trained in this call."""
        self._done += self._of
        self._left -= self._of
        self._trained += trained
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        took, elapsed = time.monotonic() - self._began, time.monotonic() - self._start
        has_estimate = self._left and self._trained
        time_left = f", about {_minutes(elapsed / self._trained * self._left)} left" if has_estimate else ""
        already_done = f" ({self._of - trained} were there)" if trained < self._of else ""
        self.say(f"{self._name}: {trained} iterations in {_minutes(took)}{already_done}{time_left}")

    def passed(self, name: str, iterations: int) -> None:
        """The run was finished by another process."""
        self._done += iterations
        self._left -= iterations
        self.say(f"{name} was finished by another process meanwhile")

    def say(self, text: str) -> None:
        """Print a line above the bar. Not interpreted as rich markup, which names may contain."""
        if self._bar is not None:
            self._bar.console.out(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest:02} s" if minutes < 10 else f"{minutes} min"

"""Trains the runs of a comparison, one after another, as `megatron-fp8 train` does; what is finished is not repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...train.exit_codes import EXIT_BAD_INPUT
from .plan import Comparison, WantedRun

_POLL_S = 0.2
_GRACE_S = 60.0  # for a run to finish its iteration and save
_HERE = Path(__file__).parents[3]


class RunFailed(RuntimeError):
    """A run of the comparison failed; another attempt may not."""


def train_all(comparison: Comparison) -> None:
    """Train every run that is not finished. A line, and on a terminal a bar with the time left, on stderr.

    Raises:
        ValueError: a folder holds a run of other settings, or a run refused its input.
        RunFailed: a run failed, or was stopped.
    """
    for run in comparison.runs:
        run.check_existing()
    todo = [run for run in comparison.runs if not run.finished]
    progress = Progress(sum(run.iterations for run in todo))
    there = len(comparison.runs) - len(todo)
    if there:
        progress.say(f"{there} of {len(comparison.runs)} runs are there already")
    with _ended_by_sigterm(), progress:
        for number, run in enumerate(todo, 1):
            progress.begin(f"{run.name} ({number} of {len(todo)})")
            _train(run, comparison, progress)
            progress.end(run.iterations)


def command(run: WantedRun, ranks: int) -> list[str]:
    """The command line of a run: alone, or under torchrun."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    return [sys.executable, *launcher, "-m", "megatron_fp8", "train", *run.arguments]


def _train(run: WantedRun, comparison: Comparison, progress: Progress) -> None:
    logs = comparison.out / "logs"
    log = logs / f"{run.folder.name}.log"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        stream = log.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out={comparison.out} cannot be written ({error.strerror}): give another folder."
        ) from error
    # The package of this process, wherever it was started.
    path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    with stream:
        process = subprocess.Popen(
            command(run, comparison.ranks), stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
        try:
            metrics = run.folder / "metrics.jsonl"
            while process.poll() is None:
                time.sleep(_POLL_S)
                progress.at(_lines(metrics))
        finally:
            _end(process)
    if process.returncode:
        said = _last_error(log)
        told = f"{run.name}: {said} (all of it: {log})"
        raise ValueError(told) if process.returncode == EXIT_BAD_INPUT else RunFailed(told)
    if not run.finished:
        raise RunFailed(
            f"{run.name} was stopped before its end; the same command goes on from there ({log})."
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """No child outlives the comparison: it is asked to save and end, and killed if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the comparison as Ctrl-C does, so that its child ends too."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _lines(path: Path) -> int:
    """Finished lines of a file; 0 where there is none."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _last_error(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")


class Progress:
    """How far all runs are, in iterations: a bar on a terminal, else a line for each run."""

    def __init__(self, iterations: int) -> None:
        self._left, self._done = iterations, 0
        self._start = self._began = time.monotonic()
        self._name = ""
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(),
                TextColumn("{task.description}"),
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

    def begin(self, name: str) -> None:
        """A run starts."""
        self._name, self._began = name, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, description=name)
        else:
            self.say(f"training {name}")

    def at(self, iterations: int) -> None:
        """The run has finished this many."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done + iterations)

    def end(self, iterations: int) -> None:
        """The run is finished."""
        self._done += iterations
        self._left -= iterations
        self.at(0)
        took, all_of_it = time.monotonic() - self._began, time.monotonic() - self._start
        left = f", about {_minutes(all_of_it / self._done * self._left)} left" if self._left else ""
        self.say(f"{self._name}: {iterations} iterations in {_minutes(took)}{left}")

    def say(self, text: str) -> None:
        """A line, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

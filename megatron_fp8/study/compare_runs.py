"""Trains the runs of a comparison and shows their progress; finished ones are not repeated."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..files.checkpoint import latest_checkpoint, read_manifest
from ..files.run_lock import LockHeld, RunLock
from ..files.terminal import printable
from ..train.resume.run_folder import checkpoint_folder
from ..train.stop import EXIT_BAD_INPUT
from .compare_plan import Comparison, WantedRun

_POLL_S = 0.2
_GRACE_S = 60.0  # time for a run to finish its iteration and save
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_HERE = Path(__file__).parents[2]


class RunFailed(RuntimeError):
    """A run of the comparison failed; another attempt may succeed."""


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Context: lock the comparison's folder; a second comparison there fails at once.

    Raises ValueError: another comparison has the lock, or the folder cannot be created.
    """
    # Without a job name: two comparisons in one SLURM job exclude each other too.
    lock = RunLock(out, "--out", environ={})
    try:
        lock.take(lambda text: print(printable(text), file=sys.stderr, flush=True))
    except OSError as error:
        raise ValueError(f"--out={out} cannot be used ({error.strerror}): give another folder.") from error
    try:
        yield
    finally:
        lock.release()


def train_all(comparison: Comparison) -> None:
    """Train every unfinished run. Prints lines to stderr.

    Raises:
        ValueError: a folder contains a run with other settings, or the first run reported bad input.
        RunFailed: a run failed, or was stopped.
    """
    for run in comparison.runs:
        run.check_existing()
    todo = [run for run in comparison.runs if not run.finished]
    progress = Progress(sum(run.iterations for run in todo))
    finished = len(comparison.runs) - len(todo)
    if finished:
        progress.say(f"{finished} of {len(comparison.runs)} runs are there already")
    first = True
    with _sigterm_as_interrupt():
        for number, run in enumerate(todo, 1):
            _wait_until_free(run, progress)
            # Check again: another process may have finished the run.
            if not (lacks := run.lacks()):
                progress.passed(run.name, run.iterations)
                continue
            metrics = run.folder / "metrics.jsonl"
            before = _lines(metrics)
            if before:
                progress.say(f"{run.name} is not finished: {lacks}")
            progress.begin(run.name, f"{number} of {len(todo)}", run.iterations, len(before))
            _train(run, comparison, progress, first=first)
            after = _lines(metrics)
            unchanged = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
            )
            progress.end(len(after) - unchanged)
            first = False


def _wait_until_free(run: WantedRun, progress: Progress) -> None:
    """Wait for a trainer left by a killed comparison to end. Raises ValueError if the folder stays locked."""
    deadline, reported = time.monotonic() + _GRACE_S, False
    while run.folder.exists():
        lock = RunLock(run.folder, "run_dir", environ={})
        try:
            lock.take(progress.say)
        except LockHeld:
            if time.monotonic() > deadline:
                raise
            if not reported:
                progress.say(f"{run.name} is being trained by another process: waiting for it")
            reported = True
            time.sleep(_POLL_S)
        except OSError as error:
            raise ValueError(
                f"{run.folder} cannot be used ({error.strerror}): give another --out."
            ) from error
        else:
            lock.release()
            return


def command(run: WantedRun, ranks: int) -> list[str]:
    """The command line of a run, with the launcher for several ranks."""
    launcher = ["launch", f"--ranks={ranks}"] if ranks > 1 else []
    return [sys.executable, "-m", "megatron_fp8", *launcher, "train", *run.arguments]


def _train(run: WantedRun, comparison: Comparison, progress: Progress, *, first: bool) -> None:
    logs = comparison.out / "logs"
    log = logs / f"{run.folder.name}.log"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        stream = log.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--out={comparison.out} cannot be written ({error.strerror}): give another folder."
        ) from error
    # The child must import the same package, whatever its working directory.
    path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    with stream:
        process = subprocess.Popen(
            command(run, comparison.ranks),
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_parent_death_signal(),
        )
        try:
            metrics = run.folder / "metrics.jsonl"
            while process.poll() is None:
                time.sleep(_POLL_S)
                progress.at(len(_lines(metrics)))
        finally:
            _terminate(process)
    if process.returncode:
        last_error = _last_error(log)
        message = f"{run.name}: {last_error} (full log: {log})"
        # Only the first run's input errors count as bad input.
        bad_input = first and process.returncode == EXIT_BAD_INPUT
        raise ValueError(message) if bad_input else RunFailed(message)
    if lacks := run.lacks():
        # A stopped run can continue. With a final checkpoint, missing lines will never be trained.
        saved = latest_checkpoint(checkpoint_folder(run.config))
        trained = saved is not None and read_manifest(saved).iteration >= run.iterations
        remedy = f"remove {run.folder} to train it anew" if trained else "the same command goes on from there"
        raise RunFailed(f"{run.name} is not finished ({lacks}): {remedy} ({log}).")


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Ends the child process: asks it to save and exit, and kills it if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the comparison like Ctrl-C, so that its child ends too."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parent_death_signal() -> Callable[[], None] | None:
    """A preexec_fn: Linux sends the child SIGTERM when this process dies, even by SIGKILL.

    A launcher passes SIGTERM on to its ranks. None on other systems: the child survives, and the next
    comparison waits for it.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent died first
            os._exit(1)

    return ask


def _lines(path: Path) -> list[bytes]:
    """Complete lines of a file; none if the file is missing."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def _last_error(log: Path) -> str:
    lines = [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")


class Progress:
    """Progress of all runs in iterations: lines for the first iteration of a run, each tenth and the last."""

    def __init__(self, iterations: int) -> None:
        self._left, self._trained = iterations, 0
        self._start = self._began = time.monotonic()
        self._name, self._of, self._tenth, self._at = "", 0, 0, 0

    def begin(self, name: str, which: str, iterations: int, there: int) -> None:
        """Start of a run.

        Args:
            which: '2 of 6'.
            iterations: of the whole run.
            there: iterations already in its folder.
        """
        self._name, self._of, self._began = name, iterations, time.monotonic()
        self._tenth, self._at = 10 * there // iterations, there
        self.say(f"training {name} ({which})")

    def at(self, iterations: int) -> None:
        """Number of iterations the run has finished."""
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
        self._left -= self._of
        self._trained += trained
        took, elapsed = time.monotonic() - self._began, time.monotonic() - self._start
        has_estimate = self._left and self._trained
        time_left = f", about {_minutes(elapsed / self._trained * self._left)} left" if has_estimate else ""
        already_done = f" ({self._of - trained} were there)" if trained < self._of else ""
        self.say(f"{self._name}: {trained} iterations in {_minutes(took)}{already_done}{time_left}")

    def passed(self, name: str, iterations: int) -> None:
        """The run was finished by another process."""
        self._left -= iterations
        self.say(f"{name} was finished by another process meanwhile")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest:02} s" if minutes < 10 else f"{minutes} min"

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
from functools import partial
from pathlib import Path
from typing import Any

from ..files.atomic_io import as_value_error
from ..files.checkpoint import latest_checkpoint, read_manifest
from ..files.run_lock import LockHeld, RunLock
from ..files.terminal import printable
from ..train.resume.run_folder import checkpoint_folder
from ..train.stop import EXIT_BAD_INPUT
from . import StudyFailed
from .compare_plan import Comparison, PlannedRun

_POLL_S = 0.2
_GRACE_S = 60.0  # time for a run to finish its iteration and save
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_HERE = Path(__file__).parents[2]


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Context: lock the comparison's folder; a second comparison there fails at once.

    Raises ValueError: another comparison has the lock, or the folder cannot be created.
    """
    # Without a job name: two comparisons in one SLURM job exclude each other too.
    lock = RunLock(out, "--out", environ={})
    with as_value_error(f"--out={out} cannot be used", ": give another folder."):
        lock.take(_say)
    try:
        yield
    finally:
        lock.release()


def train_all(comparison: Comparison) -> None:
    """Train every unfinished run. Prints lines to stderr.

    Raises:
        ValueError: a folder contains a run with other settings, or the first run reported bad input.
        StudyFailed: a run failed, or was stopped.
    """
    for run in comparison.runs:
        run.check_existing()
    todo = [run for run in comparison.runs if not run.finished]
    if len(todo) < len(comparison.runs):
        _say(f"{len(comparison.runs) - len(todo)} of {len(comparison.runs)} runs are there already")
    left, trained, start = sum(run.iterations for run in todo), 0, time.monotonic()
    with _sigterm_as_interrupt():
        for number, run in enumerate(todo, 1):
            _wait_until_free(run)
            left -= run.iterations
            # Check again: a trainer of a killed comparison may have finished the run.
            if not (lacks := run.lacks()):
                _say(f"{run.name} was finished by another process meanwhile")
                continue
            began, before = time.monotonic(), _line_count(run)
            if before:
                _say(f"{run.name} is not finished: {lacks}")
            _say(f"training {run.name} ({number} of {len(todo)})")
            try:
                _train(run, comparison, first=number == 1)
            except KeyboardInterrupt:
                _say("the same command goes on from here; finished runs are not repeated")
                raise
            added = _line_count(run) - before
            trained += added
            there = f" ({before} were there)" if before else ""
            rest = (time.monotonic() - start) / trained * left if trained else 0
            time_left = f", about {_minutes(rest)} left" if rest else ""
            _say(f"{run.name}: {added} iterations in {_minutes(time.monotonic() - began)}{there}{time_left}")


def _wait_until_free(run: PlannedRun) -> None:
    """Wait for a trainer left by a killed comparison to end. Raises ValueError if the folder stays locked."""
    if not run.folder.exists():
        return
    deadline = time.monotonic() + _GRACE_S
    lock = RunLock(run.folder, "run_dir", environ={})
    while True:
        try:
            lock.take(_say)
            lock.release()
            return
        except LockHeld:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def command(run: PlannedRun, ranks: int) -> list[str]:
    """The command line of a run, with the launcher for several ranks."""
    launcher = ["launch", f"--ranks={ranks}"] if ranks > 1 else []
    return [sys.executable, "-m", "megatron_fp8", *launcher, "train", *run.arguments]


def _train(run: PlannedRun, comparison: Comparison, *, first: bool) -> None:
    log = comparison.out / "logs" / f"{run.folder.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # The child must import the same package, whatever its working directory.
    path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command(run, comparison.ranks),
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
            preexec_fn=_ended_with_parent(),
        )
        try:
            _follow(process, run)
        finally:
            _terminate(process)
    if process.returncode:
        message = f"{run.name}: {_last_error(log)} (full log: {log})"
        # Only the first run's input errors count as bad input.
        bad_input = first and process.returncode == EXIT_BAD_INPUT
        raise ValueError(message) if bad_input else StudyFailed(message)
    if lacks := run.lacks():
        # A stopped run can continue. With a final checkpoint, missing lines will never be trained.
        saved = latest_checkpoint(checkpoint_folder(run.config))
        trained = saved is not None and read_manifest(saved).iteration >= run.iterations
        remedy = f"remove {run.folder} to train it anew" if trained else "the same command goes on from there"
        raise StudyFailed(f"{run.name} is not finished ({lacks}): {remedy} ({log}).")


def _follow(process: subprocess.Popen[bytes], run: PlannedRun) -> None:
    """Wait for the process; print a line for each tenth of its iterations."""
    start, done = time.monotonic(), _line_count(run)
    while process.poll() is None:
        time.sleep(_POLL_S)
        before, done = done, _line_count(run)
        if 10 * before // run.iterations < 10 * done // run.iterations:
            _say(f"{run.name}: {done} of {run.iterations} iterations, {_minutes(time.monotonic() - start)}")


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
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _ended_with_parent() -> Callable[[], Any] | None:
    """A preexec_fn: Linux sends the child SIGTERM when this process dies, even by SIGKILL. None on other systems."""
    if not sys.platform.startswith("linux"):
        return None
    return partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _line_count(run: PlannedRun) -> int:
    """Iterations in the run's metrics.jsonl."""
    path = run.folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("error: ")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

"""Trains the runs of a comparison; finished ones are not repeated."""

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

from ...files.checkpoint import latest_checkpoint, read_manifest
from ...files.run_lock import LockHeld, RunLock
from ...files.terminal import printable
from ...train.exit_codes import EXIT_BAD_INPUT
from ...train.run_folder import checkpoint_folder
from .plan import Comparison, WantedRun
from .progress import Progress

_POLL_S = 0.2
_GRACE_S = 60.0  # for a run to finish its iteration and save
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_HERE = Path(__file__).parents[3]


class RunFailed(RuntimeError):
    """A run of the comparison failed; another attempt may not."""


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Hold the comparison's folder: a second comparison there is refused at once.

    Raises ValueError: another comparison has it, or it cannot be made.
    """
    # No job's name: two comparisons of one SLURM job are two.
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
    """Train every run that is not finished. Lines, and on a terminal a bar with the time left, on stderr.

    Raises:
        ValueError: a folder holds a run of other settings, or the first run that is trained refused its input.
        RunFailed: a run failed, or was stopped.
    """
    for run in comparison.runs:
        run.check_existing()
    todo = [run for run in comparison.runs if not run.finished]
    progress = Progress(sum(run.iterations for run in todo))
    there = len(comparison.runs) - len(todo)
    if there:
        progress.say(f"{there} of {len(comparison.runs)} runs are there already")
    first = True
    with _ended_by_sigterm(), progress:
        for number, run in enumerate(todo, 1):
            _wait_until_free(run, progress)
            # Looked at again: whoever had the folder may have finished it.
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
            kept = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
            )
            progress.end(len(after) - kept)
            first = False


def _wait_until_free(run: WantedRun, progress: Progress) -> None:
    """Wait for a trainer that a killed comparison left: it is ending. ValueError: the folder stays another run's."""
    deadline, told = time.monotonic() + _GRACE_S, False
    while run.folder.exists():
        lock = RunLock(run.folder, "run_dir", environ={})
        try:
            lock.take(progress.say)
        except LockHeld:
            if time.monotonic() > deadline:
                raise
            if not told:
                progress.say(f"{run.name} is being trained by another process: waiting for it")
            told = True
            time.sleep(_POLL_S)
        except OSError as error:
            raise ValueError(
                f"{run.folder} cannot be used ({error.strerror}): give another --out."
            ) from error
        else:
            lock.release()
            return


def command(run: WantedRun, ranks: int) -> list[str]:
    """The command line of a run: alone, or launched."""
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
    # The package of this process, wherever it was started.
    path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    with stream:
        process = subprocess.Popen(
            command(run, comparison.ranks),
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=_ending_with_us(),
        )
        try:
            metrics = run.folder / "metrics.jsonl"
            while process.poll() is None:
                time.sleep(_POLL_S)
                progress.at(len(_lines(metrics)))
        finally:
            _end(process)
    if process.returncode:
        said = _last_error(log)
        told = f"{run.name}: {said} (all of it: {log})"
        # Bad input is what is found before anything is trained.
        bad_input = first and process.returncode == EXIT_BAD_INPUT
        raise ValueError(told) if bad_input else RunFailed(told)
    if lacks := run.lacks():
        # A run that was stopped goes on. One that has its last checkpoint trains no line that is missing before it.
        saved = latest_checkpoint(checkpoint_folder(run.config))
        trained = saved is not None and read_manifest(saved).iteration >= run.iterations
        what = f"remove {run.folder} to train it anew" if trained else "the same command goes on from there"
        raise RunFailed(f"{run.name} is not finished ({lacks}): {what} ({log}).")


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


def _ending_with_us() -> Callable[[], None] | None:
    """For the child, before its program starts: Linux sends it SIGTERM when this process dies, of SIGKILL too.

    A launcher hands SIGTERM on to its ranks. Elsewhere None: such a child lives on, and the next comparison waits for it.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl, us = ctypes.CDLL(None).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != us:  # it died before that
            os._exit(1)

    return ask


def _lines(path: Path) -> list[bytes]:
    """Finished lines of a file; none where there is no file."""
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

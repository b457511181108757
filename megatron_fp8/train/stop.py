"""How a run ends: exit codes, and stops on a signal or a time limit.

A cluster reclaims its nodes with a signal and a few minutes' notice. The signal reaches ranks at different times, and
some ranks not at all. So a signal's handler only records it. The ranks' records are summed in a collective that every
iteration has anyway: the reduction of its loss carries one more number for each reason in REASONS. After it all ranks
know the same, and leave the loop after the same iteration (and its validation, if one is due).

Rejected: saving inside the handler. It runs on one rank, at any point of a step, and a checkpoint needs all ranks,
between two steps. Rejected: a rank that decides alone. Its peers would wait for it in the next collective.

    SIGTERM                SLURM's first signal when it preempts or cancels a job; torchrun forwards it to its ranks;
                           `launch` sends it for Ctrl-C and SIGHUP too
    SIGINT                 Ctrl-C, which torchrun forwards to its ranks; again, AGAIN_S later, it ends the process unsaved
    SIGHUP                 sent by a terminal that closes; a process started by nohup continues
    SIGUSR1                sent by `sbatch --signal=USR1@300` 300 s before the job's time limit
    the job's time limit   from SLURM_JOB_END_TIME (newer versions of SLURM set it), LEAD_S before it, or twice the
                           duration of a save
    the output's reader    has ended: `| head`, or a `| tee` that Ctrl-C or a closing terminal ends before the save

No other handled signal ends the process: one during the save of the checkpoint is recorded again, without effect, and
one while Python shuts down, after its handlers are removed, is ignored. SIGKILL ends a process that hangs; torchrun and
SLURM send it after their grace time. Before training starts there is nothing to save, so SIGTERM, SIGINT or SIGHUP ends
a process at once: torchrun sends SIGTERM to all ranks when one of them has died, and they may be waiting for that one.
SIGUSR1 is recorded even then.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType

EXIT_DONE = 0
EXIT_FAILED = 1
"""Training failed, here or on another rank: the same input may succeed later. torchrun passes exit codes on; batch
scripts should restart only after this one."""
EXIT_BAD_INPUT = 2
"""The input is wrong: another attempt would fail too."""
STOPPED_CODE = "MEGATRON_FP8_STOPPED_CODE"
"""The environment variable with the exit code, if not 0, of a run that was stopped and saved."""
_LIMIT = "the job's time limit"
_READER = "the loss of its output's reader"
REASONS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", _LIMIT, _READER)
_MAY_BE_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals that a process may ignore from its start, because of `&` in a script or nohup."""
AGAIN_S = 1.0
"""SIGINTs within this time are one Ctrl-C: some terminals and `timeout` send two, and torchrun one more."""
LEAD_S = 120.0
"""Least time in seconds before the job's limit at which a run stops; in a short job a tenth of its time."""


class TrainingFailed(RuntimeError):
    """Training cannot continue. The message is one line: what happened, and what to do."""


class StopRequest:
    """Records this rank's reasons to stop, and the reason that all ranks agreed on.

    Args:
        environ: has SLURM_JOB_START_TIME and SLURM_JOB_END_TIME (seconds since 1970), STOPPED_CODE.
        clock: seconds since 1970, read once: a clock that is set later does not move the time limit.
        steady: seconds of a clock that is never set.
    """

    def __init__(
        self,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._noted = dict.fromkeys(REASONS, False)
        self._says: dict[int, str] = {}
        start, end = _job(environ)
        self._steady, self._limit, self._length = steady, steady() + end - clock(), end - start
        self._lead = min(LEAD_S, self._length / 10)
        self.exit_code = _stopped_code(environ)
        """Exit code of a run that was stopped."""
        self._interrupted: float | None = None
        self.reason: str | None = None
        """The reason, from REASONS, for which all ranks stop; None: continue."""

    def listen(self, name: str, say: str = "") -> None:
        """Record the signal `name` (one of REASONS) until the process ends. Main thread only.

        An ignored SIGINT or SIGHUP stays ignored. `say` is printed to stderr at the first signal.
        """
        number = signal.Signals[name]
        if number in _MAY_BE_IGNORED and signal.getsignal(number) == signal.SIG_IGN:
            return
        self._says[number] = say
        signal.signal(number, self._note)
        # At shutdown Python restores a handled signal's default, which kills; an ignored signal stays ignored.
        atexit.register(signal.signal, number, signal.SIG_IGN)

    def reader_left(self) -> None:
        """Record that the reader of this rank's output has ended."""
        self._noted[_READER] = True

    @property
    def unread(self) -> bool:
        """Whether ``reader_left`` was called on this rank."""
        return self._noted[_READER]

    def ended(self) -> None:
        """End of training: later signals have no effect and print nothing."""
        self._says.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = self._steady()
            self._interrupted = now if self._interrupted is None else self._interrupted
            if now - self._interrupted >= AGAIN_S:
                raise KeyboardInterrupt
        self._noted[signal.Signals(number).name] = True
        if say := self._says.pop(number, ""):
            with suppress(OSError):  # its terminal has closed; print may be what was interrupted
                os.write(2, f"\n{say}\n".encode())

    def votes(self) -> list[float]:
        """One number for each of REASONS, 1.0 if this rank has recorded it, for a sum over all ranks."""
        if self._steady() >= self._limit - self._lead:
            self._noted[_LIMIT] = True
        return [float(recorded) for recorded in self._noted.values()]

    def saved_in(self, seconds: float) -> None:
        """Set the duration of the last save: a stop before the time limit reserves twice that, at most half the job."""
        self._lead = max(self._lead, min(2 * seconds, self._length / 2))

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums over all ranks, equal on all: the first reason that any rank has decides."""
        reasons = (name for name, total in zip(REASONS, sums, strict=True) if total)
        self.reason = self.reason or next(reasons, None)


def _stopped_code(environ: Mapping[str, str]) -> int:
    code = environ.get(STOPPED_CODE, "0")
    if not (code.isascii() and code.isdigit() and int(code) <= 255):
        raise ValueError(f"{STOPPED_CODE}={code!r} must be from 0 to 255, or not set.")
    return int(code)


def _job(environ: Mapping[str, str]) -> tuple[float, float]:
    """Start and end of the job, in seconds since 1970; 0 and infinity if unknown.

    Raises ValueError if a variable is not a number.
    """
    names = ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME")
    if not all(environ.get(name) for name in names):
        return 0.0, math.inf
    try:
        start, end = (float(environ[name]) for name in names)
        if not (math.isfinite(start) and math.isfinite(end)):
            raise ValueError("not a time")
    except ValueError:
        values = ", ".join(f"{name}={environ[name]!r}" for name in names)
        raise ValueError(
            f"{values}: both must be seconds since 1970. Unset them, or set them right."
        ) from None
    return start, end

"""Stops a run between iterations, on a signal or a time limit.

A cluster takes its nodes back with a signal and a few minutes' notice, and the signal reaches ranks at different times,
some of them not at all. So a signal's handler only notes it, and the notes of all ranks are added up in a collective
that every iteration has anyway: the reduction of its loss carries one more number for each reason in REASONS. When it
returns, all ranks know the same, and leave the loop after the same iteration (and its validation, if one is due).

Rejected: saving inside the handler. It runs on one rank, at any point of a step, and a checkpoint takes all ranks,
between two steps. Rejected: a rank that decides by itself. Its peers would wait for it in the next collective.

    SIGTERM                what SLURM sends first when it preempts or cancels a job, and torchrun passes to its ranks;
                           from `launch` it stands for the signal that was sent to `launch`
    SIGINT                 Ctrl-C, and torchrun's word to its ranks for it; AGAIN_S later it ends the process, unsaved
    SIGHUP                 what a terminal sends that closes; a process that nohup started goes on
    SIGUSR1                what `sbatch --signal=USR1@300` asks for 300 s before the job's time is over
    the job's time limit   from SLURM_JOB_END_TIME (newer versions of SLURM set it), LEAD_S before it, or twice as long as
                           a save takes
    the output's reader    has left: `| head`, or a `| tee` that Ctrl-C or a closing terminal ends before the run is saved

No other signal that is listened to ends the process by itself: one that comes while the checkpoint is being written is
noted again, and changes nothing, and one that comes while Python shuts down, after its handlers are gone, is ignored. A
process that hangs is ended by SIGKILL, as torchrun and SLURM do after their grace time. Before training starts there is
nothing to save, and SIGTERM, SIGINT or SIGHUP ends a process at once, as ever: torchrun sends SIGTERM to all ranks when
one of them has died, and they may be waiting for that one to join them. SIGUSR1 is noted even then.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

_LIMIT = "the job's time limit"
_READER = "the loss of its output's reader"
REASONS = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", _LIMIT, _READER)
_MAY_BE_IGNORED = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals that a shell makes a process ignore from its start: by `&` in a script, and by nohup."""
AGAIN_S = 1.0
"""What comes within so many seconds is the same Ctrl-C: some terminals and `timeout` send it twice, torchrun again."""
LEAD_S = 120.0
"""How long before the job's time limit a run stops at least; in a short job a tenth of its time."""
STOPPED_CODE = "MEGATRON_FP8_STOPPED_CODE"
"""The environment variable that says what a run that was stopped and saved ends with, where that is not 0."""
ASKED_BY = "MEGATRON_FP8_ASKED_BY_PATH"
"""The environment variable that names a file in which `launch` writes the signal that it got, before it sends SIGTERM."""


class StopRequest:
    """What this rank has been told, and what all ranks have agreed on.

    Args:
        environ: where SLURM_JOB_START_TIME and SLURM_JOB_END_TIME (seconds since 1970), STOPPED_CODE and ASKED_BY are
            looked for.
        clock: seconds since 1970, asked once: a clock that is set while the run goes on moves no time limit.
        steady: seconds, never set.
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
        """What a run that was stopped ends with."""
        self._asked_by = environ.get(ASKED_BY)
        self._interrupted: float | None = None
        self.reason: str | None = None
        """The one of REASONS that all ranks know of and stop for; None: go on."""

    def listen(self, name: str, say: str = "") -> None:
        """Note the signal `name` (one of REASONS) from now on, to the end of the process. Main thread only.

        A SIGINT or SIGHUP that is ignored stays so. `say` goes to stderr when one comes.
        """
        number = signal.Signals[name]
        if number in _MAY_BE_IGNORED and signal.getsignal(number) == signal.SIG_IGN:
            return
        self._says[number] = say
        signal.signal(number, self._note)
        # Shutting down, Python gives a handler's signal its default back, which kills; an ignored one stays ignored.
        atexit.register(signal.signal, number, signal.SIG_IGN)

    def reader_left(self) -> None:
        """Nobody reads what this rank prints any more."""
        self._noted[_READER] = True

    @property
    def unread(self) -> bool:
        """Whether ``reader_left`` was called on this rank."""
        return self._noted[_READER]

    def ended(self) -> None:
        """Training has ended: a signal changes nothing any more, and is noted without a word."""
        self._says.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = self._steady()
            self._interrupted = now if self._interrupted is None else self._interrupted
            if now - self._interrupted >= AGAIN_S:
                raise KeyboardInterrupt
        self._noted[self._meant(signal.Signals(number).name)] = True
        if say := self._says.pop(number, ""):
            with suppress(OSError):  # its terminal has closed; not print, which may be what was interrupted
                os.write(2, f"\n{say}\n".encode())

    def _meant(self, name: str) -> str:
        """The reason that a signal is: `launch` sends SIGTERM for any signal to end, and has written which it was."""
        if name != "SIGTERM" or self._asked_by is None:
            return name
        try:
            said = Path(self._asked_by).read_text()
        except OSError:  # the launcher has gone
            return name
        return said if said in self._noted else name  # '': it was this process alone that was told

    def votes(self) -> list[float]:
        """One number for each of REASONS, 1.0 where this rank has it: to be summed over all ranks."""
        if self._steady() >= self._limit - self._lead:
            self._noted[_LIMIT] = True
        return [float(noted) for noted in self._noted.values()]

    def saved_in(self, seconds: float) -> None:
        """The last save took so long: the one before the job's time limit has twice as much, up to half of its time."""
        self._lead = max(self._lead, min(2 * seconds, self._length / 2))

    def agree(self, sums: Sequence[float]) -> None:
        """Take the sums over all ranks, which are the same on all: the first reason that any rank has counts."""
        found = (name for name, total in zip(REASONS, sums, strict=True) if total)
        self.reason = self.reason or next(found, None)


def _stopped_code(environ: Mapping[str, str]) -> int:
    code = environ.get(STOPPED_CODE, "0")
    if not (code.isascii() and code.isdigit() and int(code) <= 255):
        raise ValueError(f"{STOPPED_CODE}={code!r} must be from 0 to 255, or not set.")
    return int(code)


def _job(environ: Mapping[str, str]) -> tuple[float, float]:
    """When the job began and when its time is over, in seconds since 1970; never, where that is not known.

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
        shown = ", ".join(f"{name}={environ[name]!r}" for name in names)
        raise ValueError(
            f"{shown}: both must be seconds since 1970. Unset them, or set them right."
        ) from None
    return start, end

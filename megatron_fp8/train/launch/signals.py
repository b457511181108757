"""Signals to the launcher: its ranks save before they end.

    SIGINT (Ctrl-C), SIGTERM, SIGHUP    the ranks get SIGTERM, which any script can handle: they finish their
                                        iteration, save and end; a file tells training which signal it was
    SIGINT again, a second later        the ranks are killed
    SIGUSR1                             is forwarded, as SLURM expects

A signal that was ignored when the launcher started (nohup, `&` in a script) stays ignored. While no rank runs, the
launcher ends at once, as there is nothing to save.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from ..stop import AGAIN_S

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Stopped(Exception):
    """A signal ended the launcher while no rank ran."""


class Signals:
    """Handles the signals to this process.

    Args:
        say: prints what the first signal to end means for the ranks.
        asked_by: file that gets the name of that signal before the ranks get the signal.

    Attributes:
        stop: the first signal to end; None if there was none.
    """

    def __init__(self, say: Callable[[str], None], asked_by: Path) -> None:
        self.stop: signal.Signals | None = None
        self._say, self._asked_by, self._since = say, asked_by, 0.0
        self._ranks_run = False
        self._owed: list[signal.Signals] = []
        self._heard = [number for number in _HANDLED if signal.getsignal(number) != signal.SIG_IGN]

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Context: handle signals inside it. Main thread only."""
        previous = {number: signal.getsignal(number) for number in _HANDLED}
        try:
            self.listen(ranks_run=False)
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def listen(self, *, ranks_run: bool) -> None:
        """Install the handlers; `ranks_run`: whether ranks run now. Call it again after torch's agent has set its own."""
        self._ranks_run = ranks_run
        for number in _HANDLED:
            signal.signal(number, self._note if number in self._heard else signal.SIG_IGN)

    def hand_on(self, pids: Iterable[int]) -> None:
        """Forward to the ranks the signals since the last call."""
        pending, self._owed = self._owed, []
        if signal.SIGTERM in pending and self.stop is not None:
            with suppress(OSError):  # disk full: the ranks then report SIGTERM, and stop all the same
                self._asked_by.write_text(self.stop.name)
        for number in pending:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number), time.monotonic()
        if name != signal.SIGUSR1:
            again = self.stop == signal.SIGINT == name and now - self._since > AGAIN_S
            if self.stop is None:
                self.stop, self._since = name, now
                if self._ranks_run:
                    more = f"; again, after {AGAIN_S:g} s or later: they end at once, unsaved"
                    more = more if name == signal.SIGINT else ""
                    self._say(f"{name.name}: asked the ranks to finish their iteration, save and end{more}")
            if again:
                raise SignalException("a second Ctrl-C", signal.SIGKILL)
        if self._ranks_run:
            self._owed.append(signal.SIGUSR1 if name == signal.SIGUSR1 else signal.SIGTERM)
        else:
            self.stop = self.stop or name
            raise Stopped(name.name)

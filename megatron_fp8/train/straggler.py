"""Finds slow ranks by their own working time per iteration.

Ranks that train together take the same time for an iteration: the fast ones wait in a collective for the slow one. So a
thread checks ten times a second whether this rank waits; the rest is its own working time. About twice a minute the
ranks compare, by one more number in the reduction of the loss. This finds delays of a process: late data, a busy CPU,
Python. It does not find a GPU that is slow itself, since then all hosts wait for their GPUs.

Rejected: timing each collective. Megatron-Core calls them in dozens of places, and overlapped ones end in others.
"""

from __future__ import annotations

import threading

WINDOW_S, WINDOW_ITERATIONS = 20.0, 10
"""Least seconds and iterations of a comparison."""
_FAR, _LEAST_S = 1.5, 0.01
"""A rank is slow above this multiple of the others' mean and this many seconds more."""


class StragglerMonitor:
    """Measures one rank's own working time.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._lock = ranks, threading.Lock()
        self._own, self._all, self._iterations = 0.0, 0.0, 0
        self._share, self._total, self._said, self._slow_before = 0.0, 0.0, 0.0, False

    def sample(self, seconds: float, *, waits: bool) -> None:
        """Add `seconds` of an iteration; `waits`: this rank now waits for others."""
        with self._lock:
            self._all += seconds
            self._own += 0.0 if waits else seconds

    def share(self) -> float:
        """This rank's working seconds per iteration in the last window, for a sum over ranks; 0.0 before the first."""
        return self._share

    def take(self, total: float) -> str:
        """End an iteration; `total` is the sum of all ranks' shares. Return a line if this rank is slow, else ''."""
        warning = ""
        with self._lock:
            self._iterations += 1
            if self._all < WINDOW_S or self._iterations < WINDOW_ITERATIONS:
                self._total = total
                return ""
            own, others = self._share, (self._total - self._share) / max(1, self._ranks - 1)
            self._share = self._own / self._iterations
            self._own, self._all, self._iterations = 0.0, 0.0, 0
        delay = own - others
        slow_before = self._slow_before
        self._slow_before = slow = bool(others) and own > _FAR * others and delay > _LEAST_S
        # Twice in a row: samples are few, and a busy machine distorts some seconds.
        if slow and slow_before and delay > 2 * self._said:
            self._said = delay
            warning = (
                f"works {own:.3g} s an iteration where the others work {others:.3g} s on average, so all wait"
                f" {delay:.2g} s an iteration for it"
            )
        return warning

"""Finds the slowest rank: its own seconds against the others' mean.

Ranks that train together take the same time for an iteration, whoever is slow: the others wait in a collective for it. So
a thread looks ten times a second whether this rank waits, and what it does not wait is its own. Twice a minute or so the
ranks compare, by one number more in the reduction of the loss. It sees what a process loses: data that come late, a busy
CPU, Python. A GPU that is slow by itself it does not see, since all hosts wait for their GPUs then.

Rejected: timing each collective. Megatron-Core calls them in dozens of places, and those that overlap end in others.
"""

from __future__ import annotations

import threading

WINDOW_S, WINDOW_ITERATIONS = 20.0, 10
"""A comparison takes at least so many seconds and so many iterations."""
_FAR, _LEAST_S = 1.5, 0.01
"""Slow is a rank that takes so many times the others' seconds, and so many seconds more."""


class Pace:
    """One rank's seconds of its own.

    Args:
        ranks: how many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._lock = ranks, threading.Lock()
        self._own, self._all, self._iterations = 0.0, 0.0, 0
        self._share, self._total, self._said, self._slow_before = 0.0, 0.0, 0.0, False

    def sample(self, seconds: float, *, waits: bool) -> None:
        """So many seconds of an iteration have passed, and at their end this rank waits for others, or does not."""
        with self._lock:
            self._all += seconds
            self._own += 0.0 if waits else seconds

    def share(self) -> float:
        """This rank's own seconds an iteration in the last window, to be summed over ranks; 0.0: there was none."""
        return self._share

    def take(self, total: float) -> str:
        """An iteration is done, and this is the sum of all ranks' shares. A line if this rank is slow, else ''."""
        said = ""
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
        # Twice in a row: looks are few, and a busy machine is unfair for some seconds.
        if slow and slow_before and delay > 2 * self._said:
            self._said = delay
            said = (
                f"works {own:.3g} s an iteration where the others work {others:.3g} s on average, so all wait"
                f" {delay:.2g} s an iteration for it"
            )
        return said

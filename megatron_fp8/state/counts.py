"""Counters of one iteration on this rank, and where a thread counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass
class IterationCounts:
    """What one iteration did on this rank. ``nonfinite`` sums the slots' counts after the reduction."""

    fp8_gemms: int = 0
    hp_gemms: int = 0
    casts: int = 0
    amax_collectives: int = 0
    scaling_collectives: int = 0
    nonfinite: int = 0

    def __bool__(self) -> bool:
        """Whether anything was counted."""
        return any(vars(self).values())

    def add(self, other: IterationCounts) -> None:
        """Count what the other has, too."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Counter:
    """Where the calling thread counts: in the counts of the iteration, or in counts of its own.

    An evaluation that runs in another thread than the training must leave no trace. To undo what it counted would undo
    what the training counted meanwhile.

    Attributes:
        iteration: the counts of the iteration that runs.
    """

    def __init__(self) -> None:
        self.iteration = IterationCounts()
        self._thread = threading.local()

    def __reduce__(self) -> tuple[type[Counter], tuple[()]]:
        """Copies and pickles begin anew."""
        return Counter, ()

    @property
    def here(self) -> IterationCounts:
        """The counts of the calling thread."""
        own: IterationCounts | None = getattr(self._thread, "counts", None)
        return self.iteration if own is None else own

    @contextmanager
    def apart(self, counts: IterationCounts) -> Iterator[None]:
        """The calling thread counts in these."""
        outer = getattr(self._thread, "counts", None)
        self._thread.counts = counts
        try:
            yield
        finally:
            self._thread.counts = outer

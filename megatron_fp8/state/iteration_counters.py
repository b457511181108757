"""Counters of one iteration on this rank, per thread where needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields


@dataclass
class IterationCounts:
    """The work of one iteration on this rank. ``nonfinite`` is the sum of the slots' counts after the reduction."""

    fp8_gemms: int = 0
    hp_gemms: int = 0
    casts: int = 0
    amax_collectives: int = 0
    scaling_collectives: int = 0
    nonfinite: int = 0

    def __bool__(self) -> bool:
        """Whether any count is not zero."""
        return any(vars(self).values())

    def add(self, other: IterationCounts) -> None:
        """Adds the other's counts to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Counter:
    """Selects the counts to which the calling thread adds: the iteration's, or separate ones.

    An evaluation in another thread than the training must not change the iteration's counts. Subtracting its counts
    afterwards would also subtract what the training counted meanwhile.

    Attributes:
        iteration: the counts of the current iteration.
    """

    def __init__(self) -> None:
        self.iteration = IterationCounts()
        self._thread = threading.local()

    def __reduce__(self) -> tuple[type[Counter], tuple[()]]:
        """Copies and pickles start with new counts."""
        return Counter, ()

    @property
    def here(self) -> IterationCounts:
        """The counts of the calling thread."""
        own: IterationCounts | None = getattr(self._thread, "counts", None)
        return self.iteration if own is None else own

    @contextmanager
    def apart(self, counts: IterationCounts) -> Iterator[None]:
        """Inside, the calling thread adds to these counts."""
        outer = getattr(self._thread, "counts", None)
        self._thread.counts = counts
        try:
            yield
        finally:
            self._thread.counts = outer

"""The FP8 state of one model: arenas, the current iteration, the last one's counts.

Everything that an iteration settles goes through ``Fp8State.finish_iteration``, once, after the last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .arena import Arena, Group, Slot
from .counts import Counter, IterationCounts
from .guard import Finding, Guard
from .iteration import in_backward
from .observer import Observer
from .phases import Phase, Phases


@dataclass
class Activity:
    """Which work an iteration has seen, beside its counters. A plain object, so that traced code can write to it.

    Attributes:
        backwards: number of backward calls of sites since the state was made.
        ended: ``backwards`` at the last end of an iteration.
        traced: compiled code in high precision, which counts nothing, may have run in this iteration.
        awaits: a forward of this iteration ran through which a backward may come.
    """

    backwards: int = 0
    ended: int = 0
    traced: bool = False
    awaits: bool = False

    def end(self) -> None:
        """The iteration is over."""
        self.ended, self.traced, self.awaits = self.backwards, False, False


@dataclass
class Fp8State:
    """All arenas of one model, and the iteration they are in. Deep copies of a config share it.

    Attributes:
        device: where slots, scales and histories are.
        iteration: the one that runs, counted from 0.
        weight_generation: marks quantised weights that are kept as stale.
        keeps_weights: quantised weights serve until then, since nobody writes weights meanwhile without a trace (through
            ``.data``); False: each forward quantises its weight.
        keeps_columnwise: of weights that need codes of their own for dgrad, these are kept until backward; False: each
            backward makes them again.
        seed: of stochastic rounding.
        phases: in which iterations FP8 runs.
        counter: of the iteration that runs, on this rank.
        last: of the last finished iteration; its ``nonfinite`` is the verdict on health (Megatron-Core: of all ranks).
        arenas: one for each reduction group.
        capturing: a CapturedStep (graph.py) captures.
        missing_end: error message of the next training forward, if an optimizer stepped and the iteration was not ended.
        activity: what ran, beside the counters.
        experiment: iterations that end now are not ended (``unrecorded``).
        watcher: who watches (``watch``).
        observer: who is told what passes in this iteration: the watcher, if it wants to. Follows from both.
        guard: looks for tensors that are ill in each iteration; None: nobody does.
        ill: what it found in the last finished iteration.
        phase: of this iteration; follows from ``phases``. None where the training's length should be known and is not.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    iteration: int = 0
    weight_generation: int = 0
    keeps_weights: bool = True
    keeps_columnwise: bool = True
    seed: int = 0
    phases: Phases = field(default_factory=Phases)
    counter: Counter = field(default_factory=Counter, repr=False, compare=False)
    last: IterationCounts = field(default_factory=IterationCounts)
    arenas: list[Arena] = field(default_factory=list)
    capturing: bool = False
    missing_end: str = ""
    _missed_in_backward: bool = field(default=False, init=False, repr=False, compare=False)
    activity: Activity = field(default_factory=Activity)
    experiment: bool = False
    watcher: Observer | None = None
    guard: Guard | None = None
    ill: list[Finding] = field(default_factory=list)
    _outside: IterationCounts | None = field(default=None, init=False, repr=False, compare=False)
    _along: tuple[Callable[[], torch.Tensor], list[float]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    phase: Phase | None = field(init=False, repr=False, compare=False)
    observer: Observer | None = field(default=None, init=False, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8State:
        return self

    def arena(self, group: Group) -> Arena:
        """The arena of a group, made on first use. Ranks must ask for their groups in the same order."""
        for arena in self.arenas:
            if arena.group is group:
                return arena
        self.arenas.append(Arena(group, self.device, self.counter, self.observer))
        return self.arenas[-1]

    def reduce_over(self, group: Group) -> None:
        """Every arena is shared by these ranks from now on: those of a model that was built before they were known."""
        for arena in self.arenas:
            arena.group = group

    def watch(self, observer: Observer | None) -> None:
        """From now on this one is told of casts and products; None: nobody is. There is one at a time."""
        assert observer is None or self.watcher is None, (
            "somebody watches already: who watches last stops first"
        )
        self.watcher = observer

    def __setattr__(self, name: str, value: Any) -> None:
        """What follows from the iteration is kept: traced code guards on what it reads, and one on the iteration would
        fail in the next."""
        super().__setattr__(name, value)
        if name in ("iteration", "phases") and hasattr(self, "phases"):
            self.phase = self.phases.at(self.iteration) if self.phases.known else None
        if name in ("iteration", "watcher"):
            self._tell(
                self.watcher if self.watcher is not None and self.watcher.wants(self.iteration) else None
            )

    def _tell(self, observer: Observer | None) -> None:
        if observer is not self.observer:
            self.observer = observer
            for arena in self.arenas:
                arena.observer = observer

    def known_phase(self) -> Phase:
        """The phase of this iteration. ValueError where the training's length should be known and is not."""
        return self.phase or self.phases.at(self.iteration)

    @property
    def counts(self) -> IterationCounts:
        """Of the iteration that runs, on this rank; inside ``uncounted`` what was counted there."""
        return self.counter.here

    def slots(self) -> list[Slot]:
        """Every slot of every arena."""
        return [slot for arena in self.arenas for slot in arena.slots]

    @contextmanager
    def uncounted(self) -> Iterator[IterationCounts]:
        """What this thread counts inside is none of the iteration's. Yields the counts that have it.

        Nothing is counted while torch.compile traces; its operators use this when they run.
        """
        inside = IterationCounts()
        if torch.compiler.is_compiling():
            yield inside
            return
        with self.counter.apart(inside):
            yield inside

    def miss_end(self, message: str) -> None:
        """Make the next training forward an error with this message: an optimizer stepped before the iteration ended."""
        self.missing_end, self._missed_in_backward = message, in_backward()

    @property
    def must_end_first(self) -> bool:
        """Whether a training forward is an error here. No recomputation is, if the optimizer steps in the backward."""
        return bool(self.missing_end) and not (self._missed_in_backward and in_backward())

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Hides casts and products inside from the observer."""
        observer = self.observer
        self._tell(None)
        try:
            yield
        finally:
            self._tell(observer)

    @property
    def ran(self) -> bool:
        """Whether anything of this iteration ran on this rank."""
        return bool(self.counts) or self.activity.traced

    @property
    def came_back(self) -> bool:
        """Whether a backward reached a site in this iteration, on this rank."""
        return self.activity.backwards != self.activity.ended

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """What is cast inside, in training too, leaves no trace: neither amaxes nor counts, and no observer is told.

        For experiments between two iterations: one that ends inside (a schedule ends it) changes nothing. Delayed scales
        are those of now.
        """
        rows = [arena.rows.clone() for arena in self.arenas]
        watcher, missing_end, activity = self.watcher, self.missing_end, replace(self.activity)
        counts = replace(self.counter.iteration)
        self.watch(None)
        self.experiment = True
        try:
            yield
        finally:
            vars(self.counter.iteration).update(vars(counts))  # a backward counts in threads of autograd's
            for arena, before in zip(self.arenas, rows, strict=True):
                arena.rows.copy_(before)
            self.experiment, self.missing_end = False, missing_end
            vars(self.activity).update(vars(activity))
            self.watch(watcher)

    @contextmanager
    def reading_along(self, figures: Callable[[], torch.Tensor]) -> Iterator[list[float]]:
        """An iteration that ends inside reads these figures back with its own, in the one wait for the GPU that it has.

        Args:
            figures: called then, on every rank: a vector on the state's device. It may be a collective's result.

        Yields:
            A list, empty until then, of the figures in float64.
        """
        told: list[float] = []
        self._along = figures, told
        try:
            yield told
        finally:
            self._along = None

    def begin_capture(self) -> None:
        """What follows is captured, not run: counted apart, and no quantised weight is shared with what is run."""
        assert not self.capturing, "captures do not nest"
        self.capturing = True
        self._outside, self.counter.iteration = self.counter.iteration, IterationCounts()

    def end_capture(self) -> IterationCounts:
        """Back to what is run; what was captured does at each replay."""
        assert self._outside is not None, "end_capture comes after begin_capture"
        self.capturing = False
        captured, self.counter.iteration = self.counter.iteration, self._outside
        self.weight_generation += 1
        return captured

    def count_replay(self, counts: IterationCounts) -> IterationCounts:
        """An iteration was replayed that did this."""
        self.last = counts
        self.iteration += 1
        self.weight_generation += 1
        self.activity.backwards += 1  # which the replay's own Python did not count
        self.activity.ended = self.activity.backwards
        return counts

    def finish_iteration(self, ran: bool = True) -> IterationCounts:
        """Reduce and update every arena, once, after the iteration's last backward. Returns what the iteration did.

        Collective: every rank of every group must call it, each iteration. Not inside a CapturedStep, which does it.

        Args:
            ran: whether there is an iteration to end on this rank. Where no rank has one, nothing is ended.
        """
        assert not self.capturing, "CapturedStep finishes the iteration that it captures"
        if self.experiment:
            return replace(self.counts)
        before = None if ran else (replace(self.counts), [arena.rows.clone() for arena in self.arenas])
        told = self._read([arena.reduce(ran) for arena in self.arenas])
        if before is not None and not any(anywhere for *_, anywhere in told):
            counts, rows = before
            vars(self.counts).update(vars(counts))
            for arena, own in zip(self.arenas, rows, strict=True):
                arena.rows.copy_(own[:, : len(arena.slots)])
            return IterationCounts()
        if self.arenas:
            self.ill = []
            for arena, (more, nonfinite, _) in zip(self.arenas, told, strict=True):
                self.counts.nonfinite += int(arena.reduce_new() if more else nonfinite)
                if self.guard is not None and self.phase == "fp8":  # no cast uses a scale in other phases
                    self.ill += self.guard.look(arena)  # before the update: by the scales that were used
                arena.update(self.iteration)
        if self.watcher is not None:
            self.watcher.ended(self.iteration)
        self.last, self.counter.iteration = self.counter.iteration, IterationCounts()
        self.iteration += 1
        self.weight_generation += 1
        self.missing_end = ""
        self.activity.end()
        return self.last

    def discard_iteration(self) -> None:
        """Begin the iteration anew: forget what it has counted and recorded."""
        self.counter.iteration, self.missing_end = IterationCounts(), ""
        for arena in self.arenas:
            arena.rows.zero_()
        self.activity.end()

    def continue_from(self, other: Fp8State) -> None:
        """Take the counts and the activity of another state's iteration, in which a copied model is, too."""
        self.counter.iteration.add(other.counter.iteration)
        self.activity = replace(
            other.activity, backwards=other.activity.backwards - other.activity.ended, ended=0
        )
        self.missing_end = other.missing_end

    def _read(self, reduced: list[torch.Tensor]) -> list[list[float]]:
        """What arenas reduced, float32 [3] each, and what is read along: all that an iteration reads back."""
        if self._along is None:
            return torch.stack(reduced).tolist() if reduced else []
        figures, told = self._along
        own = torch.stack(reduced).double().flatten() if reduced else None
        along = figures().double()
        values = (along if own is None else torch.cat([own, along])).tolist()
        count = 3 * len(reduced)
        told[:] = values[count:]
        return [values[start : start + 3] for start in range(0, count, 3)]

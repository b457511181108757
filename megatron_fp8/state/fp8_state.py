"""The FP8 state of one model: arenas, the current iteration, the last one's counts.

``Fp8State.finish_iteration`` makes all of an iteration's updates, once, after the last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .arena import Arena, Group, Slot
from .guard import Finding, Guard
from .iteration import Counter, IterationCounts, in_backward
from .observer_protocol import Observer
from .precision_schedule import Phase, PrecisionSchedule

FAST_ACCUMULATION: dict[str, tuple[str, ...]] = {
    "fprop": ("fprop",),
    "all": ("fprop", "dgrad", "wgrad"),
    "none": (),
}
"""The setting ``fast_accumulation`` -> the GEMMs that accumulate fast, where their scales allow it."""


@dataclass
class Activity:
    """Work of an iteration besides its counters. A plain object, so that compiled code can write to it.

    Attributes:
        backwards: backward calls of sites since the state was made.
        ended: ``backwards`` at the last end of an iteration.
        traced: compiled code in high precision, which counts nothing, may have run in this iteration.
        awaits_backward: a forward of this iteration may still get a backward.
    """

    backwards: int = 0
    ended: int = 0
    traced: bool = False
    awaits_backward: bool = False

    def end(self) -> None:
        """Marks the end of the iteration."""
        self.ended, self.traced, self.awaits_backward = self.backwards, False, False


@dataclass
class Fp8State:
    """All arenas of one model, and their current iteration. Deep copies of a config share it.

    Attributes:
        device: of slots, scales and histories.
        iteration: the current one, counted from 0.
        weight_generation: a cached quantized weight of another generation is stale.
        keeps_weights: cache quantized weights within a generation. Only if no code writes weights meanwhile through
            ``.data``, which the cache cannot detect. False: each forward quantizes its weight.
        fast_gemms: GEMMs in which tensor cores may keep partial sums at their own precision.
        keeps_columnwise: cache dgrad's separate codes of weights until backward; False: backward quantizes them anew.
        seed: of stochastic rounding.
        phases: the iterations in which FP8 runs.
        counter: counts of the current iteration on this rank.
        last: counts of the last finished iteration; its ``nonfinite`` is the health status (Megatron-Core: of all
            ranks).
        arenas: one for each reduction group.
        capturing: a CapturedStep (cuda_graph.py) captures.
        missing_end: error message of the next training forward, if an optimizer stepped before the iteration was ended.
        activity: work of the iteration besides its counters.
        experiment: inside ``unrecorded``, where ``finish_iteration`` changes nothing.
        watcher: the observer set by ``watch``.
        observer: the watcher, if it wants this iteration, else None. Derived from both.
        guard: looks for unhealthy tensors in each iteration; None: no guard.
        findings: the guard's findings in the last finished iteration.
        begun: a new object whenever an iteration begins, restarts or is loaded. Random streams number backwards from it.
        phase: of this iteration, derived from ``phases``. None if the training's length is needed and not set.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    iteration: int = 0
    weight_generation: int = 0
    keeps_weights: bool = True
    keeps_columnwise: bool = True
    fast_gemms: tuple[str, ...] = FAST_ACCUMULATION["fprop"]
    seed: int = 0
    phases: PrecisionSchedule = field(default_factory=PrecisionSchedule)
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
    findings: list[Finding] = field(default_factory=list)
    _outside: IterationCounts | None = field(default=None, init=False, repr=False, compare=False)
    _extra_figures: tuple[Callable[[], torch.Tensor], list[float]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    begun: object = field(init=False, repr=False, compare=False)
    phase: Phase | None = field(init=False, repr=False, compare=False)
    observer: Observer | None = field(default=None, init=False, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8State:
        return self

    def arena(self, group: Group) -> Arena:
        """Returns the arena of a group, created on first use. Ranks must request their groups in the same order."""
        for arena in self.arenas:
            if arena.group is group:
                return arena
        self.arenas.append(Arena(group, self.device, self.counter, self.observer))
        return self.arenas[-1]

    def reduce_over(self, group: Group) -> None:
        """Makes every arena reduce over this group from now on, for models built before their ranks were known."""
        for arena in self.arenas:
            arena.group = group

    def watch(self, observer: Observer | None) -> None:
        """Sets the observer that receives casts and products; None removes it. There is one at a time."""
        assert observer is None or self.watcher is None, "another observer is set: remove it first"
        self.watcher = observer

    def __setattr__(self, name: str, value: Any) -> None:
        """Updates the attributes that depend on the iteration. Compiled code guards on what it reads; a guard on the
        iteration itself would fail in the next iteration."""
        super().__setattr__(name, value)
        if name == "iteration":
            self.begun = object()
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
        """Returns the phase of this iteration. ValueError if the training's length is needed and not set."""
        return self.phase or self.phases.at(self.iteration)

    @property
    def counts(self) -> IterationCounts:
        """Counts of the current iteration on this rank; inside ``uncounted`` the separate counts."""
        return self.counter.current

    def slots(self) -> list[Slot]:
        """Returns every slot of every arena."""
        return [slot for arena in self.arenas for slot in arena.slots]

    @contextmanager
    def uncounted(self) -> Iterator[IterationCounts]:
        """Inside, this thread adds to separate counts, which it yields, and not to the iteration's.

        torch.compile counts nothing while it traces; its operators use this when they run.
        """
        inside = IterationCounts()
        if torch.compiler.is_compiling():
            yield inside
            return
        with self.counter.separate(inside):
            yield inside

    def set_missing_end(self, message: str) -> None:
        """Makes the next training forward raise with this message: an optimizer stepped before the iteration ended."""
        self.missing_end, self._missed_in_backward = message, in_backward()

    @property
    def must_end_first(self) -> bool:
        """Whether a training forward raises here; not a recomputation while the optimizer steps in the backward."""
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
        """Whether this rank ran anything in this iteration."""
        return bool(self.counts) or self.activity.traced

    @property
    def had_backward(self) -> bool:
        """Whether a backward reached a site in this iteration, on this rank."""
        return self.activity.backwards != self.activity.ended

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Inside, casts change no amaxes and no counts, in training too, and no observer sees them.

        For experiments between two iterations. If a schedule ends an iteration inside, nothing changes. Delayed scales
        stay as they are.
        """
        restorers = [arena.restorer() for arena in self.arenas]
        watcher, missing_end, activity = self.watcher, self.missing_end, replace(self.activity)
        counts = replace(self.counter.iteration)
        self.watch(None)
        self.experiment = True
        try:
            yield
        finally:
            vars(self.counter.iteration).update(vars(counts))  # a backward counts in autograd's threads
            for restore in restorers:
                restore()
            self.experiment, self.missing_end = False, missing_end
            vars(self.activity).update(vars(activity))
            self.watch(watcher)

    @contextmanager
    def read_with_arenas(self, figures: Callable[[], torch.Tensor]) -> Iterator[list[float]]:
        """An iteration that ends inside reads additional figures back in its only wait for the GPU.

        Args:
            figures: called at that time, on every rank; returns a vector on the state's device. It may use a collective.

        Yields:
            A list of the figures as floats, empty until then.
        """
        result: list[float] = []
        self._extra_figures = figures, result
        try:
            yield result
        finally:
            self._extra_figures = None

    def begin_capture(self) -> None:
        """Starts a capture: it has separate counts and shares no quantized weight with eager code."""
        assert not self.capturing, "captures do not nest"
        self.capturing = True
        self._outside, self.counter.iteration = self.counter.iteration, IterationCounts()

    def end_capture(self) -> IterationCounts:
        """Ends a capture; returns what each replay counts."""
        assert self._outside is not None, "end_capture comes after begin_capture"
        self.capturing = False
        captured, self.counter.iteration = self.counter.iteration, self._outside
        self.weight_generation += 1
        return captured

    def count_replay(self, counts: IterationCounts) -> IterationCounts:
        """Ends a replayed iteration: these counts, and those of eager calls since the last end. Returns their sum."""
        self.activity.backwards += 1  # a replay runs no Python that counts it
        counts.add(self.counter.iteration)
        self._end(counts)
        return counts

    def finish_iteration(self, ran: bool = True) -> IterationCounts:
        """Reduces and updates every arena; call it once, after the iteration's last backward. Returns the iteration's
        counts.

        Collective: every rank of every group must call it, each iteration. Not inside a CapturedStep, which does it.

        Args:
            ran: whether this rank has an iteration to end. If no rank has one, nothing changes.
        """
        assert not self.capturing, "CapturedStep finishes the iteration that it captures"
        if self.experiment:
            return replace(self.counts)
        before = None if ran else (replace(self.counts), [arena.rows.clone() for arena in self.arenas])
        reduced = self._read([arena.reduce(ran) for arena in self.arenas])
        if before is not None and not any(ran_anywhere for *_, ran_anywhere in reduced):
            counts, rows = before
            vars(self.counts).update(vars(counts))
            for arena, saved in zip(self.arenas, rows, strict=True):
                arena.rows.copy_(saved[:, : len(arena.slots)])
            return IterationCounts()
        if self.arenas:
            self.findings = []
            for arena, (has_new, nonfinite, _) in zip(self.arenas, reduced, strict=True):
                self.counts.nonfinite += int(arena.reduce_new() if has_new else nonfinite)
                if self.guard is not None and self.phases.casts_in(self.phase):
                    self.findings += self.guard.look(
                        arena
                    )  # before the update: with the scales that casts used
                arena.update(self.iteration)
        if self.watcher is not None:
            self.watcher.ended(self.iteration)
        self._end(self.counter.iteration)
        return self.last

    def _end(self, counts: IterationCounts) -> None:
        self.last, self.counter.iteration = counts, IterationCounts()
        self.iteration += 1
        self.weight_generation += 1
        self.missing_end = ""
        self.activity.end()

    def discard_iteration(self) -> None:
        """Restarts the iteration: discards its counts and records."""
        self.counter.iteration, self.missing_end, self.begun = IterationCounts(), "", object()
        for arena in self.arenas:
            arena.rows.zero_()
        self.activity.end()

    def merge_iteration(self, other: Fp8State) -> None:
        """Adds the counts and the activity of another state's iteration: a copied model's, or of linears that join."""
        self.counter.iteration.add(other.counter.iteration)
        self.missing_end = self.missing_end or other.missing_end
        mine, others = self.activity, other.activity
        mine.backwards += others.backwards - others.ended
        mine.traced |= others.traced
        mine.awaits_backward |= others.awaits_backward

    def _read(self, reduced: list[torch.Tensor]) -> list[list[float]]:
        """Reads the arenas' reduced values, float32 [3] each, and additional figures: an iteration's only host sync."""
        if self._extra_figures is None:
            return torch.stack(reduced).tolist() if reduced else []
        figures, result = self._extra_figures
        own = torch.stack(reduced).double().flatten() if reduced else None
        along = figures().double()
        values = (along if own is None else torch.cat([own, along])).tolist()
        count = 3 * len(reduced)
        result[:] = values[count:]
        return [values[start : start + 3] for start in range(0, count, 3)]

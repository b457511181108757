"""The watchdog: a thread that reports a run without progress.

    run_dir/stacks/START/iteration-12-step-15s/rank-3.txt    one line of JSON (rank, host, what, where), then all stacks

A rank whose iteration (or validation, or save) takes far longer than earlier ones makes such a folder. The other ranks,
which see a long iteration themselves by then, look for folders and write their stacks too. A rank that writes nothing
is dead, suspended or cut off. The lowest rank that wrote reads all files and reports in one line which ranks differ and
where they are. This repeats after each doubling of the time.

It uses files, because they reach every rank that lives: collectives hang, and the start-up store may belong to the
suspended rank, so that calls to it never return. While iterations take their usual time, no file is read or written.
Durations come from a monotonic clock. Time in which the whole process was suspended does not count as the iteration's;
it is reported separately.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...files.terminal import ranks_in_words
from .stack_dump import place_of, stacks, waits

_LOOK_S = 0.1
_SEARCH_S, _SEARCHES = 1.0, 1000.0
"""Seconds between two searches of the folder in a long phase, and most searches per second over all ranks."""
_TIMES, _HISTORY, _LEAST_HISTORY = 3.0, 16, 3
"""The bound is 3 times the second longest of the last 16 phases, once there are three."""
_SUSPENDED_S = 3.0
"""If the thread did not run for this time, and for half of `least`, the process was suspended."""
_SHOWN = 8
START = "start"
"""The phase before the first iteration: read data, build the model, load a checkpoint."""
_TIMES_AT_START = 4.0
"""START may take this many times `least`. Exceeding it only prints a line."""
WINDOW_S, WINDOW_ITERATIONS = 20.0, 10
"""Least seconds and iterations of a comparison."""
_FAR, _LEAST_S = 1.5, 0.01
"""A rank is slow above this multiple of the others' mean and this many seconds more."""


class StragglerMonitor:
    """Measures one rank's own working time per iteration, to find slow ranks.

    Ranks that train together take the same time for an iteration: the fast ones wait in a collective for the slow one. So
    a thread checks ten times a second whether this rank waits; the rest is its own working time. About twice a minute the
    ranks compare, by one more number in the reduction of the loss. This finds delays of a process: late data, a busy CPU,
    Python. It does not find a GPU that is slow itself, since then all hosts wait for their GPUs.

    Rejected: timing each collective. Megatron-Core calls them in dozens of places, and overlapped ones end in others.

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


class _Phase(NamedTuple):
    kind: str
    iteration: int
    since: float

    @property
    def words(self) -> str:
        if self.kind == START:
            return "the start"
        return f"iteration {self.iteration}" + ("" if self.kind == "step" else f" ({self.kind})")


class Watchdog:
    """Watches the thread that makes it, from the first `enter` to `close`.

    Args:
        folder: folder of this start's stack dumps; made when needed.
        rank, ranks: this rank's number and the number of ranks.
        stages: number of pipeline stages.
        least: seconds that a phase may always take; four times as many in START, and 20 times as many in the first
        three
            phases of each other kind. 0: no watchdog.
        limit: timeout of a collective in seconds; the bound is at most half of it.
        say: prints a line, from the watching thread too.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        *,
        least: float,
        limit: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        stages: int = 1,
    ) -> None:
        self._stages, self._failed = stages, ""
        self.folder, self.rank, self.ranks, self.pace = folder, rank, ranks, StragglerMonitor(ranks)
        self._least, self._limit, self._say, self._clock = least, limit, say, clock
        self._thread_id = threading.get_ident()
        self._took: dict[str, deque[float]] = {}
        self._phase: _Phase | None = None
        self._seen: set[str] = set()
        self._newest: Path | None = None
        self._to_read: tuple[Path, float] | None = None
        self._rounds, self._still, self._spoke = 0, 0.0, False
        self._search = max(_SEARCH_S, ranks / _SEARCHES)
        self._looked = self._searched = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    # ------------------------------------------------------------------------------------------ the main thread

    def start(self) -> None:
        """Start watching."""
        self._looked = self._searched = self._clock()
        if self._least:
            self._thread.start()

    def close(self) -> None:
        """Stop watching. May be called again."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def enter(self, kind: str, iteration: int) -> None:
        """Begin a phase: START, 'step', 'validation', 'save' or 'end', of `iteration`."""
        now, previous = self._clock(), self._phase
        self._phase = _Phase(kind, iteration, now)
        if previous is None:
            self._looked = now
        else:
            took = now - previous.since - self._still
            took_of = self._took.setdefault(previous.kind, deque(maxlen=_HISTORY))
            took_of.append(min(took, self.bound(previous.kind)))  # bounds the effect of one hang
            if self._spoke:
                self._say(f"{previous.words} went on after {took:.0f} s")
        self._rounds, self._still, self._spoke, self._newest, self._to_read = 0, 0.0, False, None, None

    def iterated(self, total: float) -> None:
        """Take the sum of all ranks' `pace.share()` from the reduction of the loss."""
        if slow := self.pace.take(total):
            stage = "; or its pipeline stage has more to do than others" if self._stages > 1 else ""
            self._say(f"warning: rank {self.rank} on {socket.gethostname()} is slow: it {slow}{stage}")

    def bound(self, kind: str) -> float:
        """Seconds after which a phase of this kind counts as too long."""
        took = sorted(self._took.get(kind, ()))
        if kind == START:
            bound = _TIMES_AT_START * self._least
        else:
            bound = 20 * self._least if len(took) < _LEAST_HISTORY else max(self._least, _TIMES * took[-2])
        return min(bound, self._limit / 2)

    @property
    def phase(self) -> str:
        """This rank's phase, such as 'iteration 12 (save)'."""
        return self._phase.words if self._phase else "the first iteration"

    def differing_ranks(self) -> str:
        """Which ranks differ most, by the newest files; '' if no rank has reported this phase."""
        return self._differences(self._newest)[0] if self._newest and self._records(self._newest) else ""

    # ------------------------------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            if self._phase is None:
                continue
            try:
                self.look()
            except Exception as error:  # without this thread the other ranks would report this rank as dead
                if self._failed != repr(error):
                    self._failed = repr(error)
                    self._say(
                        f"warning: the watchdog of rank {self.rank} failed ({self._failed}) and goes on"
                    )

    def look(self) -> None:
        """One check, made by the watching thread ten times a second."""
        now, phase = self._clock(), self._phase
        assert phase is not None
        pause, self._looked = now - self._looked, now
        if pause > max(_SUSPENDED_S, self._least / 2):
            self._still += pause
            if phase.kind != START:  # there a library may block all threads while it reads
                self._say(
                    f"warning: rank {self.rank} on {socket.gethostname()} stood still for {pause:.0f} s: it was stopped,"
                    " or its machine was suspended or out of memory"
                )
        elif phase.kind == "step" and self.ranks > 1 and len(self._took.get("step", ())) >= _LEAST_HISTORY:
            frame = self._main_frame()
            self.pace.sample(pause, waits=frame is None or waits(frame))
        elapsed, bound = now - phase.since - self._still, self.bound(phase.kind)
        to_read = self._to_read  # the main thread may reset it at any time
        if to_read and now >= to_read[1]:
            self._to_read = None
            self._report(to_read[0], phase, elapsed)
        if elapsed < min(self._least, bound) / 3 or now - self._searched < self._search:
            return
        self._searched = now
        for folder in self._folders():
            if folder.name not in self._seen and self._is_relevant(folder, phase):
                self._write_stacks(folder, phase, elapsed)
        if elapsed >= bound * 2**self._rounds and phase is self._phase:
            name = f"iteration-{phase.iteration}-{phase.kind}-{elapsed:.0f}s"
            self._write_stacks(self.folder / name, phase, elapsed)

    def _main_frame(self) -> Any:
        return sys._current_frames().get(self._thread_id)

    def _folders(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except OSError:  # a rank that cannot write there reports it
            return []

    def _is_relevant(self, folder: Path, phase: _Phase) -> bool:
        """Whether the rank that made this folder may wait for this rank, or this rank for it."""
        if folder.name.startswith(f"iteration-0-{START}-"):
            return not self._took.get("step")  # after a step no rank is in START
        return _iteration(folder) >= phase.iteration - 1

    def _write_stacks(self, folder: Path, phase: _Phase, elapsed: float) -> None:
        """Write this rank's stacks to `folder`, and plan to read the others' a little later."""
        self._rounds += 1
        self._seen.add(folder.name)
        self._newest = folder
        where = place_of(self._thread_id)
        record = {
            "rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "in": phase.words,
            "seconds": round(elapsed, 1), "kind": where.kind, "where": where.text,
        }  # fmt: skip
        try:
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".rank-{self.rank}.part"
            part.write_text(f"{json.dumps(record)}\n\n{stacks()}")
            part.rename(folder / f"rank-{self.rank}.txt")
        except OSError as error:
            self._say(
                f"waiting     {phase.words} takes {elapsed:.0f} s so far: rank {self.rank} is in {where.text}; its stacks"
                f" cannot be written to {str(folder)!r} ({error.strerror})"
            )
            return
        self._to_read = (
            folder,
            self._clock() + max(self._least / 5, 2 * self._search),
        )  # the others write too

    def _report(self, folder: Path, phase: _Phase, elapsed: float) -> None:
        """Report which ranks differ, unless a lower rank has written or some rank compiles."""
        if any((folder / f"rank-{lower}.txt").exists() for lower in range(self.rank)):
            return
        if elapsed < 20 * self._least and any(
            record["kind"] == "compiles" for record in self._records(folder)
        ):
            return
        self._spoke = True
        took = sorted(self._took.get(phase.kind, ()))
        usual = f" (of late {took[-2]:.2g} s)" if len(took) >= _LEAST_HISTORY else ""
        differences = "; ".join(self._differences(folder))
        self._say(
            f"waiting     {phase.words} takes {elapsed:.0f} s so far{usual}: {differences}. Stacks: {folder}"
        )

    def _records(self, folder: Path) -> list[dict[str, Any]]:
        records = []
        for path in folder.glob("rank-*.txt"):
            with suppress(OSError, ValueError):  # such a rank counts as silent
                records.append(json.loads(path.read_text().partition("\n")[0]))
        return sorted(records, key=lambda record: int(record["rank"]))

    def _differences(self, folder: Path) -> list[str]:
        """'rank 3 does not answer ...', 'ranks 0, 1, 2 wait in ...': smallest groups first, waiting ranks last."""
        records = self._records(folder)
        answered = {record["rank"] for record in records}
        parts = []
        if silent := [rank for rank in range(self.ranks) if rank not in answered]:
            do = "do not answer: they are" if len(silent) > 1 else "does not answer: it is"
            parts.append(f"{ranks_in_words(silent)} {do} stopped, dead or cut off")
        groups: dict[tuple[str, str, str], list[int]] = {}
        for record in records:
            groups.setdefault((record["kind"], record["where"], record["in"]), []).append(record["rank"])
        ordered = sorted(groups.items(), key=lambda item: (item[0][0] == "waits", len(item[1])))
        for (kind, where, words), ranks in ordered[:_SHOWN]:
            verb = {"waits": "wait", "compiles": "compile"}.get(kind, "work")
            parts.append(f"{ranks_in_words(ranks)} {verb}{'s' * (len(ranks) == 1)} in {words}: {where}")
        return parts


def _iteration(folder: Path) -> int:
    """The iteration in a folder's name: 12 for 'iteration-12-step-15s'."""
    number = folder.name.split("-")[1:2]
    return int(number[0]) if number and number[0].isdecimal() else -1

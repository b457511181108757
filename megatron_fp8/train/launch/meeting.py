"""Start-up of ranks: missing ranks, one config, a common end.

Ranks meet in a store before they make a process group, which cannot tell why it does not come about. There a rank that
refuses its input, or fails, leaves a message: the others end within a second or two with its exit code, wherever they
are, in a collective too, and the message is printed once. There they compare what must be equal before anything is
computed, and there it can be seen which rank has not come. A thread of each rank looks into the store until training is
under way; then a rank that is gone is torchrun's or SLURM's to notice.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ..exit_codes import EXIT_FAILED
from .rendezvous import Rendezvous

FIRST_LINE_S = 20.0
"""Seconds of waiting after which missing ranks are named; each further line comes after twice as long."""
_LOOK_S = 0.5  # between two looks into the store
_GRACE_S = 2.0  # for what other ranks are about to say
_ANSWER_S = 10.0  # for the store to answer one question
_GIVE_UP_S = 1800.0  # of a store that does not answer
_CONNECT_S = 60.0  # to reach a store that is there, as all ranks do at once
ALONE = "to run alone, unset these variables"
_SHOWN = 8  # ranks, or settings, that a line names
_STORE_LOST = (
    "the store where all ranks meet is gone: rank 0 has ended before the first step, and says why itself"
)


class NotMet(dist.DistError):
    """Ranks that were waited for did not come, or stopped answering. Nothing says that another attempt will fail too."""


def _end_process(code: int) -> None:
    """From a thread: the main one may be in a collective that nobody will ever complete."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answered(question: Callable[[], str], seconds: float) -> str | None:
    """The store's answer; None if it is gone, or is kept by a rank that is stopped: then the question waits for ever."""
    answer: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(question())

    thread = threading.Thread(target=ask, name="question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


class Meeting:
    """The ranks of one launch, on their way to the first step. A context: leaving it by an exception ends all ranks.

    With one rank nothing is waited for.

    Args:
        launch: rank, world_size, local_rank, master_addr, master_port and told of this process.
        environ: where torchrun's variables are.
        end: how the process ends when another rank says so; takes the exit code.
    """

    def __init__(
        self,
        launch: Any,
        environ: Mapping[str, str] = os.environ,
        end: Callable[[int], None] = _end_process,
    ) -> None:
        self.rank, self.world_size = launch.rank, launch.world_size
        self._first_here = launch.local_rank == (1 if launch.rank == launch.local_rank else 0)
        self._told = f" ({', '.join(launch.told)}; {ALONE})" if launch.told else ""
        self._place = Rendezvous(launch.rank, launch.master_addr, launch.master_port, environ)
        self._end = end
        self._store: dist.Store | None = None
        self._problem: ValueError | None = None
        self._connected, self._over = threading.Event(), threading.Event()
        self._stage = self._wait_name = "start"
        self._since = self._answered = time.monotonic()
        self._thread: threading.Thread | None = None
        if self.world_size > 1:
            self._thread = threading.Thread(target=self._watch, name="meeting", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch_store, name="store", daemon=True).start()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not self._over.is_set():
            self.tell(
                EXIT_FAILED, f"rank {self.rank} failed before the first step: {type(error).__name__}: {error}"
            )
        self.close()

    def close(self) -> None:
        """Training is under way: from now on nobody watches. May be called again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    @property
    def keeps_store(self) -> bool:
        """Whether all ranks are connected to this process, which keeps the store."""
        return self.world_size > 1 and self._place.hosted

    # ------------------------------------------------------------------------------------------ ending together

    def tell(self, code: int, message: str, say: Callable[[], None] = lambda: None) -> None:
        """Make all ranks end with `code`; `say` is called if this rank is the first to do so.

        Returns when the others know, or after a few seconds. The caller ends with the same code.
        """
        if self.world_size == 1 or not self._connected.wait(10.0) or self._store is None:
            say()
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, to all as soon as one has ended
        hosting, watched = self._place.hosted, not self._over.is_set()
        self._over.set()
        mine = json.dumps([code, self.rank, message])
        store = self._store
        answer = _answered(lambda: store.compare_set("end", "", mine).decode(), _ANSWER_S)
        if answer is None or answer == mine:
            say()
        if answer is None:
            return
        # Whoever keeps the store gives the others time to come and read it.
        seconds = (10.0 if hosting else 3.0) if watched else 1.0
        with suppress(RuntimeError, TimeoutError):  # the store is gone; a rank is stopped or has not come
            self._store.add("told", 1)
            wanted = self.world_size if hosting else self._count("come")
            self._until(lambda: self._count("told") >= wanted, seconds)

    def _hear(self) -> None:
        """End this process if another rank has said so."""
        assert self._store is not None
        if not self._store.check(["end"]):
            return
        code, rank, _ = json.loads(self._store.get("end"))
        if rank == self.rank or self._over.is_set():
            return
        self._store.add("told", 1)
        self._over.set()
        self._end(code)

    # ------------------------------------------------------------------------------------------ the same run

    def agree(
        self, what: str, facts: Mapping[str, Any], timeout_s: float = 1800.0, partial: bool = False
    ) -> None:
        """Wait until every rank has called this with equal `facts`, which JSON can hold. `what` names the call.

        partial: this rank looked at some things only, and takes rank 0's word for the others; rank 0 has all.

        Raises ValueError, on rank 0, naming ranks, keys and values that differ; the others end with it. Raises NotMet on
        any rank after `timeout_s`.
        """
        if self.world_size == 1:
            return
        self.arrive(what, timeout_s)
        store, mine = self._store, json.loads(json.dumps(facts))
        assert store is not None
        if self.rank == 0:
            store.set(what, json.dumps(mine))
        self._wait(lambda: bool(store.check([what])), timeout_s)
        first = json.loads(store.get(what))
        mine = {**first, **mine} if partial else mine
        pairs = {key: [first.get(key), mine.get(key)] for key in {**first, **mine}}
        different = {key: pair for key, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1])}
        if different:
            number = store.add(f"{what} different", 1)
            store.set(f"{what} different {number}", json.dumps([self.rank, different]))
        else:
            store.add(f"{what} same", 1)
        if self.rank != 0:
            self._wait(lambda: bool(store.check([f"{what} agreed"])), timeout_s)
            return
        self._wait(lambda: self._compared(what) >= self.world_size or self._differ(what), timeout_s)
        if self._differ(what):
            time.sleep(_GRACE_S)  # for the others that differ
            raise ValueError(_describe(self._all_different(what)))
        store.set(f"{what} agreed", "1")

    def _compared(self, what: str) -> int:
        return self._count(f"{what} same") + self._count(f"{what} different")

    def _differ(self, what: str) -> bool:
        return self._count(f"{what} different") > 0

    def _all_different(self, what: str) -> list[tuple[int, dict[str, list[Any]]]]:
        assert self._store is not None
        numbers = range(1, self._count(f"{what} different") + 1)
        return sorted(json.loads(self._store.get(f"{what} different {number}")) for number in numbers)

    def group_store(self, timeout_s: float = 1800.0) -> dist.Store:
        """A store for the process group, with a connection of its own. All ranks are there when it returns.

        `timeout_s` is the group's: NCCL makes each communicator when it is first used, and a rank that comes to that
        early waits in the store for the one that is still compiling kernels or waiting for its pipeline's first batch.
        """
        if self.world_size == 1:  # needs no port, and so never meets another run on it
            return dist.HashStore()
        found: list[dist.Store] = []

        def connects() -> bool:
            found.extend(store for store in [self._place.connect()] if store is not None)
            return bool(found)

        try:
            self._until(connects, _CONNECT_S)
        except TimeoutError:
            raise dist.DistNetworkError(_STORE_LOST) from None
        found[0].set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore("group", found[0])

    def arrive(self, stage: str, timeout_s: float = 0.0) -> None:
        """Say that this rank is at `stage`, where the next thing is to wait for all. Raises NotMet as `agree`, and
        ValueError where ranks cannot meet (`Rendezvous.connect`)."""
        if self.world_size == 1:
            return
        if self._stage != "start":  # else it waits since then
            self._wait_name, self._since = stage, time.monotonic()
        self._stage = stage
        self._wait(self._connected.is_set, timeout_s)
        if self._problem is not None:
            raise self._problem
        assert self._store is not None
        self._store.set(f"at {stage} {self.rank}", "1")

    def first_to_say(self, what: str) -> int:
        """The rank that said `what` first: this one, if nobody had. After `arrive`."""
        if self.world_size == 1:
            return self.rank
        assert self._store is not None
        return int(self._store.compare_set(what, "", str(self.rank)))

    # ------------------------------------------------------------------------------------------ waiting

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            self._until(condition, timeout_s)
        except TimeoutError:
            raise NotMet(
                f"{self._missing()} after {timeout_s / 60:.3g} minutes: look at their logs and nodes, or raise "
                "train.distributed_timeout_minutes."
            ) from None

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return when `condition` holds. Raises TimeoutError after `timeout_s`."""
        deadline, pause = time.monotonic() + timeout_s, 0.01
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    def _count(self, key: str) -> int:
        assert self._store is not None
        return self._store.add(key, 0)

    # ------------------------------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        beats, lines, since, pause = 0, 0, self._since, 0.0
        while not self._over.wait(pause):
            self._answered = time.monotonic()
            try:
                if self._store is None:
                    self._come()
                    pause = min(2 * pause + 0.02, _LOOK_S) if self._store is None else _LOOK_S
                else:
                    beats += 1
                    self._store.set(f"beat {self.rank}", str(beats))
                    self._hear()
            except RuntimeError:  # the connection is lost
                if not self._over.wait(_GRACE_S):
                    print(f"error: {_STORE_LOST}", file=sys.stderr, flush=True)
                    self._over.set()
                    self._end(EXIT_FAILED)
                return
            if since != self._since:
                since, lines = self._since, 0
            if time.monotonic() - since >= FIRST_LINE_S * 2**lines:
                lines += 1
                self._say_who_is_missing(lines, FIRST_LINE_S * 2 ** (lines - 1))

    def _watch_store(self) -> None:
        """Say that the store does not answer: whoever asks one that a stopped rank keeps waits for ever."""
        lines = 0
        while not self._over.wait(_LOOK_S):
            silent = time.monotonic() - self._answered
            lines = lines if silent > FIRST_LINE_S else 0
            what = (
                f"the store at {self._place.address}:{self._place.port} does not answer: whoever keeps it, rank 0 or"
                " torchrun, is stopped or cut off"
            )
            if silent >= _GIVE_UP_S:
                print(f"error: {what}, for {silent / 60:.3g} minutes", file=sys.stderr, flush=True)
                self._over.set()
                self._end(EXIT_FAILED)
            elif silent >= FIRST_LINE_S * 2**lines:
                lines += 1
                if self._first_here:
                    print(f"waiting     {silent:.0f} s so far: {what}", file=sys.stderr, flush=True)

    def _come(self) -> None:
        try:
            store = self._place.connect()
        except ValueError as error:
            self._problem = error
            self._connected.set()
            self._over.set()
            return
        if store is None:
            return
        store.add("come", 1)
        if store.add(f"rank {self.rank}", 1) > 1:
            self._problem = ValueError(
                f"two processes of this launch are rank {self.rank}: check RANK, or SLURM_PROCID, of the launch line."
            )
        self._store = store
        self._connected.set()

    def _say_who_is_missing(self, number: int, seconds: float) -> None:
        """One line, from one rank, if there is somebody to wait for. Only that rank looks who it is."""
        if self._store is None:
            mine = self._first_here
        else:
            mine = self._store.add(f"line {number} of {self._wait_name}", 1) == 1
        if mine and (missing := self._missing()):
            print(f"waiting     {seconds:.0f} s so far: {missing}", file=sys.stderr, flush=True)

    def _missing(self) -> str:
        """Who has not come to this rank's stage, or does not answer; empty if all have and do."""
        store, stage = self._store, self._stage
        if store is None:
            where = f"{self._place.address}:{self._place.port}"
            agent = ", where torchrun should (TORCHELASTIC_USE_AGENT_STORE=True)" if self._place.agent else ""
            return f"rank 0 has not come: nobody listens at {where}{agent}{self._told}"
        ranks = range(self.world_size)
        not_started = self._absent("rank", ranks)
        alone = self._told if len(not_started) == self.world_size - 1 else ""
        if stage == "start":
            return _named("have not started", not_started, self.world_size) + alone
        before = self._beats()
        time.sleep(2 * _LOOK_S + _GRACE_S)
        absent, now = self._absent(f"at {stage}", ranks), self._beats()
        known = {*absent, self.rank}
        silent = [rank for rank in ranks if rank not in known and now.get(rank) == before.get(rank)]
        parts = [
            _named("have not come", absent, self.world_size),
            _named("do not answer", silent, self.world_size),
        ]
        return "; ".join(part for part in parts if part) + alone

    def _absent(self, what: str, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose key is not there; asked by halves, since of many ranks few are missing."""
        assert self._store is not None
        if self._store.check([f"{what} {rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self._absent(what, ranks[:middle]) + self._absent(what, ranks[middle:])

    def _beats(self) -> dict[int, bytes]:
        """The latest beat of every rank that has one."""
        assert self._store is not None
        ranks = range(self.world_size)
        absent = set(self._absent("beat", ranks))
        beating = [rank for rank in ranks if rank not in absent]
        return dict(zip(beating, self._store.multi_get([f"beat {rank}" for rank in beating]), strict=True))


def _named(what: str, ranks: list[int], world_size: int) -> str:
    """'2 of 8 ranks have not come: 3, 5'; empty without ranks."""
    if not ranks:
        return ""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"{len(ranks)} of {world_size} ranks {what}: {shown}"


def _describe(different: list[tuple[int, dict[str, list[Any]]]]) -> str:
    """One line of all that differs: (rank, {key: [rank 0's value, its own]}), None where a rank has none."""
    keys = list(dict.fromkeys(key for _, found in different for key in found))
    parts = []
    for key in keys[:_SHOWN]:
        by_value: dict[str, list[int]] = {}
        for rank, found in different:
            if key in found:
                first, own = found[key]
                by_value.setdefault(_shown(own), []).append(rank)
        others = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
        parts.append(f"{key} is {_shown(first)} on rank 0 and {others}")
    more = f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"the ranks differ: {'; '.join(parts)}{more}. Start every rank with the same command, files and packages."


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f", ... ({len(ranks)})" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."

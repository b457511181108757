"""Start-up checks of ranks: missing ranks, equal settings, joint termination.

Ranks connect to a store before they make a process group, because a process group that fails to form reports no cause.
A rank that refuses its input, or fails, writes a message to the store. The others then end within about two seconds
with its exit code, even inside a collective, and the message is printed once. In the store the ranks also compare what
must be equal before the first step, and missing ranks are found. A thread of each rank polls the store until training
starts. Later, torchrun or SLURM must notice a rank that dies.
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

from ..failure import EXIT_FAILED
from .environment import ALONE
from .rendezvous import Rendezvous

FIRST_LINE_S = 20.0
"""Missing ranks are reported after this wait in seconds, and again after each doubling of it."""
_LOOK_S = 0.5  # polling interval
_GRACE_S = 2.0  # for messages from other ranks that are still to come
_ANSWER_S = 10.0  # limit for one answer of the store
_GIVE_UP_S = 1800.0  # limit for a store that does not answer
_CONNECT_S = 60.0  # limit to connect to a store that exists; all ranks connect at once
_SHOWN = 8  # most ranks, or settings, in one line
_STORE_LOST = (
    "the ranks' start-up store is lost: rank 0 ended before the first step, and its own message has the cause"
)


class RanksMissing(dist.DistError):
    """Ranks did not start in time, or stopped answering. Another attempt may succeed."""


def _end_process(code: int) -> None:
    """End the process from a thread: the main thread may be stuck in a collective."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _answered(question: Callable[[], str], seconds: float) -> str | None:
    """The store's answer; None if the store is lost, or if its process is suspended (the call then never returns)."""
    answer: list[str] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(question())

    thread = threading.Thread(target=ask, name="question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else None


class StartupBarrier:
    """Connects the ranks of one launch until the first step. A context: an exception that leaves it ends all ranks.

    One rank waits for nothing.

    Args:
        launch: provides rank, world_size, local_rank, master_addr, master_port and told.
        environ: holds torchrun's variables.
        end: ends this process after another rank's message; takes the exit code.
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

    def __enter__(self) -> StartupBarrier:
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
        """Stop watching, once training has started. May be called again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    @property
    def keeps_store(self) -> bool:
        """Whether this process hosts the store, so that all ranks connect to it."""
        return self.world_size > 1 and self._place.hosted

    # ------------------------------------------------------------------------------------------ ending together

    def tell(self, code: int, message: str, say: Callable[[], None] = lambda: None) -> None:
        """End all ranks with `code`; `say` is called if this rank is the first to end them.

        Returns when the others have read the message, or after a few seconds. The caller ends with the same code.
        """
        if self.world_size == 1 or not self._connected.wait(10.0) or self._store is None:
            say()
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all once one has ended
        hosting, watched = self._place.hosted, not self._over.is_set()
        self._over.set()
        message_json = json.dumps([code, self.rank, message])
        store = self._store
        answer = _answered(lambda: store.compare_set("end", "", message_json).decode(), _ANSWER_S)
        if answer is None or answer == message_json:
            say()
        if answer is None:
            return
        # The host of the store stays for some seconds, so that the others can read the message.
        seconds = (10.0 if hosting else 3.0) if watched else 1.0
        with suppress(RuntimeError, TimeoutError):  # store lost; rank suspended or not started
            self._store.add("told", 1)
            required = self.world_size if hosting else self._count("come")
            self._poll(lambda: self._count("told") >= required, seconds)

    def _poll_end(self) -> None:
        """End this process if another rank has written that all must end."""
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
        """Wait until every rank has called this with equal `facts` (values that JSON can hold). `what` names the call.

        partial: this rank has only some of the facts; the others are taken from rank 0, which has all.

        Raises ValueError on rank 0 that names ranks, keys and values that differ; the other ranks end with it. Raises
        RanksMissing on any rank after `timeout_s`.
        """
        if self.world_size == 1:
            return
        self.arrive(what, timeout_s)
        store, own = self._store, json.loads(json.dumps(facts))
        assert store is not None
        if self.rank == 0:
            store.set(what, json.dumps(own))
        self._wait(lambda: bool(store.check([what])), timeout_s)
        first = json.loads(store.get(what))
        own = {**first, **own} if partial else own
        pairs = {key: [first.get(key), own.get(key)] for key in {**first, **own}}
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
            time.sleep(_GRACE_S)  # other ranks may differ too
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
        """A store for the process group, with its own connection. Returns once all ranks have arrived.

        `timeout_s` is the group's. NCCL makes a communicator at its first use. A rank that arrives there early waits in
        the store for a rank that still compiles kernels, or that waits for its pipeline's first batch.
        """
        if self.world_size == 1:  # needs no port, so no other run can interfere
            return dist.HashStore()
        stores: list[dist.Store] = []

        def connects() -> bool:
            stores.extend(store for store in [self._place.connect()] if store is not None)
            return bool(stores)

        try:
            self._poll(connects, _CONNECT_S)
        except TimeoutError:
            raise dist.DistNetworkError(_STORE_LOST) from None
        stores[0].set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore("group", stores[0])

    def arrive(self, stage: str, timeout_s: float = 0.0) -> None:
        """Record that this rank has reached `stage`, where it will wait for all ranks.

        Raises RanksMissing as `agree`, and ValueError where ranks cannot connect (`Rendezvous.connect`).
        """
        if self.world_size == 1:
            return
        if self._stage != "start":  # a rank that is still in "start" has waited since then
            self._wait_name, self._since = stage, time.monotonic()
        self._stage = stage
        self._wait(self._connected.is_set, timeout_s)
        if self._problem is not None:
            raise self._problem
        assert self._store is not None
        self._store.set(f"at {stage} {self.rank}", "1")

    def first_to_say(self, what: str) -> int:
        """The first rank that claimed `what`; this rank, if none had. Call it after `arrive`."""
        if self.world_size == 1:
            return self.rank
        assert self._store is not None
        return int(self._store.compare_set(what, "", str(self.rank)))

    # ------------------------------------------------------------------------------------------ waiting

    def _wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        try:
            self._poll(condition, timeout_s)
        except TimeoutError:
            raise RanksMissing(
                f"{self._missing()} after {timeout_s / 60:.3g} minutes: look at their logs and nodes, or raise "
                "train.distributed_timeout_minutes."
            ) from None

    def _poll(self, condition: Callable[[], bool], timeout_s: float) -> None:
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
                    self._connect()
                    pause = min(2 * pause + 0.02, _LOOK_S) if self._store is None else _LOOK_S
                else:
                    beats += 1
                    self._store.set(f"beat {self.rank}", str(beats))
                    self._poll_end()
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
                self._report_missing(lines, FIRST_LINE_S * 2 ** (lines - 1))

    def _watch_store(self) -> None:
        """Report a store that does not answer: calls to a store of a suspended process never return."""
        lines = 0
        while not self._over.wait(_LOOK_S):
            silent = time.monotonic() - self._answered
            lines = lines if silent > FIRST_LINE_S else 0
            what = (
                f"the store at {self._place.address}:{self._place.port} does not answer: its host, rank 0 or"
                " torchrun, is suspended or cut off"
            )
            if silent >= _GIVE_UP_S:
                print(f"error: {what}, for {silent / 60:.3g} minutes", file=sys.stderr, flush=True)
                self._over.set()
                self._end(EXIT_FAILED)
            elif silent >= FIRST_LINE_S * 2**lines:
                lines += 1
                if self._first_here:
                    print(f"waiting     {silent:.0f} s so far: {what}", file=sys.stderr, flush=True)

    def _connect(self) -> None:
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

    def _report_missing(self, line: int, seconds: float) -> None:
        """Print which ranks are missing, from one rank alone; only that rank searches for them."""
        if self._store is None:
            reports = self._first_here
        else:
            reports = self._store.add(f"line {line} of {self._wait_name}", 1) == 1
        if reports and (missing := self._missing()):
            print(f"waiting     {seconds:.0f} s so far: {missing}", file=sys.stderr, flush=True)

    def _missing(self) -> str:
        """Describe the ranks that have not reached this rank's stage or do not answer; empty if there are none."""
        store, stage = self._store, self._stage
        if store is None:
            where = f"{self._place.address}:{self._place.port}"
            agent = ", where torchrun should (TORCHELASTIC_USE_AGENT_STORE=True)" if self._place.agent else ""
            return f"rank 0 has not started: nothing listens at {where}{agent}{self._told}"
        ranks = range(self.world_size)
        not_started = self._absent("rank", ranks)
        alone = self._told if len(not_started) == self.world_size - 1 else ""
        if stage == "start":
            return _named("have not started", not_started, self.world_size) + alone
        before = self._heartbeats()
        time.sleep(2 * _LOOK_S + _GRACE_S)
        absent, now = self._absent(f"at {stage}", ranks), self._heartbeats()
        absent_or_own = {*absent, self.rank}
        silent = [rank for rank in ranks if rank not in absent_or_own and now.get(rank) == before.get(rank)]
        parts = [
            _named("have not come", absent, self.world_size),
            _named("do not answer", silent, self.world_size),
        ]
        return "; ".join(part for part in parts if part) + alone

    def _absent(self, what: str, ranks: Sequence[int]) -> list[int]:
        """The `ranks` without a key in the store. Searches by halves, since few ranks are missing."""
        assert self._store is not None
        if self._store.check([f"{what} {rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self._absent(what, ranks[:middle]) + self._absent(what, ranks[middle:])

    def _heartbeats(self) -> dict[int, bytes]:
        """The latest heartbeat of every rank that has sent one."""
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
    """One line for all differences: (rank, {key: [rank 0's value, its own]}); a missing value is None."""
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

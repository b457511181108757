"""Start-up checks of ranks: missing ranks, equal settings, joint termination.

Ranks connect to a store before they make a process group, because a process group that fails to form reports no cause:
gloo's monitored barrier needs a group of all ranks. A rank that refuses its input, or fails, writes that to the store.
The others then end within about two seconds with its exit code, even in a collective, and the message is printed once.
In the store the ranks also compare what must be equal before the first step, and missing ranks are found. A thread of
each rank polls the store until training starts. Later, torchrun or SLURM must notice a rank that dies.

The store is torchrun's, or one that rank 0 makes. torchrun uses one store in every attempt (torch 2.13). A restarted
rank would read the addresses of dead ranks there: gloo's connection is refused, or waits. So the keys of each attempt
get their own prefix. With several nodes each torchrun counts its own restarts, so attempt numbers differ. torchrun
must then not share its store; the ranks make one on a new port each time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...files.atomic_io import as_value_error
from ...files.terminal import ranks_in_words
from ..stop import EXIT_FAILED
from .environment import ALONE

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
_SAME = "Start every rank with the same command, files and packages."


class RanksMissing(dist.DistError):
    """Ranks did not start in time, or stopped answering. Another attempt may succeed."""


def check_restarts(environ: Mapping[str, str]) -> None:
    """Raise ValueError if torchrun may restart ranks of several nodes, which would then find addresses of dead ranks."""
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if shared and environ.get("GROUP_WORLD_SIZE", "1") != "1" and restarts != "0":
        raise ValueError(
            f"torchrun with --max-restarts={restarts} on several nodes would give restarted ranks the addresses of dead "
            "ones: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, with --rdzv-backend=c10d, or "
            "--max-restarts=0."
        )


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


class _Intervals:
    """When a line about a wait is due: after FIRST_LINE_S, and at each doubling."""

    def __init__(self) -> None:
        self.lines = 0

    def due(self, waited: float) -> bool:
        """Whether the next line is due; counts it."""
        if waited < FIRST_LINE_S * 2**self.lines:
            return False
        self.lines += 1
        return True


class StartupBarrier:
    """Connects the ranks of one launch until the first step. A context: an exception that leaves it ends all ranks.

    One rank waits for nothing.

    Args:
        launch: provides rank, world_size, local_rank, master_addr, master_port and variables.
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
        self._address = launch.master_addr, launch.master_port
        self._from_torchrun = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.hosts_store = launch.world_size > 1 and launch.rank == 0 and not self._from_torchrun
        """Whether this process hosts the store, so that all ranks connect to it."""
        restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"attempt {restarts}" if self._from_torchrun else "ranks"
        self._first_here = launch.local_rank == (1 if launch.rank == launch.local_rank else 0)
        self._variables = f" ({', '.join(launch.variables)}; {ALONE})" if launch.variables else ""
        self._end = end
        self._store: dist.Store | None = None
        self._problem: ValueError | None = None
        self._connected, self._over = threading.Event(), threading.Event()
        self._answered = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="start-up", daemon=True)
        if self.world_size > 1:
            self._thread.start()

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
        if self._connected.is_set():
            self._thread.join(timeout=10)

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
        watched = not self._over.is_set()
        self._over.set()
        end, store = json.dumps([code, self.rank, message]), self._store
        answer = _answered(lambda: store.compare_set("end", "", end).decode(), _ANSWER_S)
        if answer is None or answer == end:
            say()
        if answer is None:
            return
        # The host of the store stays for some seconds, so that the others can read the message.
        seconds = (10.0 if self.hosts_store else 3.0) if watched else 1.0
        with suppress(RuntimeError, TimeoutError):  # store lost; rank suspended or not started
            store.add("told", 1)
            required = self.world_size if self.hosts_store else store.add("come", 0)
            self._poll(lambda: store.add("told", 0) >= required, seconds)

    # ------------------------------------------------------------------------------------------ the same run

    def agree(
        self, what: str, facts: Mapping[str, Any], timeout_s: float = 1800.0, partial: bool = False
    ) -> None:
        """Wait until every rank has called this with equal `facts` (values that JSON can hold). `what` names the call.

        partial: this rank has only some of the facts; the others are taken from rank 0, which has all.

        Raises ValueError on rank 0 if facts differ, with ranks, keys and values. The other ranks then exit too. Raises
        RanksMissing on any rank after `timeout_s`, and ValueError where ranks cannot connect.
        """
        if self.world_size == 1:
            return
        self._wait(what, self._connected.is_set, timeout_s)
        if self._problem is not None:
            raise self._problem
        store = self._store
        assert store is not None
        store.set(f"{what} {self.rank}", json.dumps([partial, facts]))
        if self.rank != 0:
            self._wait(what, lambda: bool(store.check([f"{what} agreed"])), timeout_s)
            return
        keys = [f"{what} {rank}" for rank in range(self.world_size)]
        self._wait(what, lambda: bool(store.check(keys)), timeout_s)
        (_, first), *others = map(json.loads, store.multi_get(keys))
        different = []
        for rank, (some, own) in enumerate(others, 1):
            own = {**first, **own} if some else own
            pairs = {key: (first.get(key), own.get(key)) for key in {**first, **own}}
            unequal = {key: pair for key, pair in pairs.items() if json.dumps(pair[0]) != json.dumps(pair[1])}
            if unequal:
                different.append((rank, unequal))
        if different:
            raise ValueError(_describe(different))
        store.set(f"{what} agreed", "1")

    def group_store(self, timeout_s: float = 1800.0) -> dist.Store:
        """A store for the process group, with its own connection, after the first `agree`.

        `timeout_s` is the group's. NCCL makes a communicator at its first use. A rank that arrives there early waits in
        the store for a rank that still compiles kernels, or that waits for its pipeline's first batch.
        """
        if self.world_size == 1:  # needs no port, so no other run can interfere
            return dist.HashStore()
        store = self._connection()
        store.set_timeout(timedelta(seconds=timeout_s))
        return dist.PrefixStore("group", dist.PrefixStore(self._prefix, store))

    # ------------------------------------------------------------------------------------------ waiting

    def _wait(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        """Return when `condition` holds. Says who is missing meanwhile."""
        begun, intervals = time.monotonic(), _Intervals()

        def holds() -> bool:
            if condition():
                return True
            if intervals.due(waited := time.monotonic() - begun) and self._reports(what, intervals.lines):
                print(
                    f"waiting     {waited:.0f} s so far: {self._missing(what)}", file=sys.stderr, flush=True
                )
            return False

        try:
            self._poll(holds, timeout_s)
        except TimeoutError:
            raise RanksMissing(
                f"{self._missing(what)} after {timeout_s / 60:.3g} minutes: look at their logs and nodes, or raise "
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

    def _reports(self, what: str, line: int) -> bool:
        """Whether this rank prints a line: one rank of a node while there is no store, one of all ranks later."""
        if self._store is None:
            return self._first_here
        return self._store.add(f"line {line} of {what}", 1) == 1

    def _missing(self, what: str) -> str:
        """Describe the ranks that have not called `agree` with `what`."""
        if self._store is None:
            where = "{}:{}".format(*self._address)
            agent = (
                ", where torchrun should (TORCHELASTIC_USE_AGENT_STORE=True)" if self._from_torchrun else ""
            )
            return f"rank 0 has not started: nothing listens at {where}{agent}{self._variables}"
        for key, words in (("rank", "have not started"), (what, "have not come")):
            absent = [rank for rank in range(self.world_size) if not self._store.check([f"{key} {rank}"])]
            if absent:
                shown = ", ".join(map(str, absent[:_SHOWN])) + (", ..." if len(absent) > _SHOWN else "")
                alone = self._variables if len(absent) == self.world_size - 1 else ""
                return f"{len(absent)} of {self.world_size} ranks {words}: {shown}{alone}"
        return "rank 0 still compares what the ranks have found"

    # ------------------------------------------------------------------------------------------ the threads

    def _watch(self) -> None:
        """Connect; then, until training starts, end this process if another rank has written that all must end."""
        try:
            self._store = self._connect()
        except ValueError as error:
            self._problem = error
        self._answered = time.monotonic()
        self._connected.set()
        if self._store is None:
            return
        threading.Thread(target=self._watch_store, name="store", daemon=True).start()
        while not self._over.wait(_LOOK_S):
            try:
                if self._store.check(["end"]):
                    code, rank, _ = json.loads(self._store.get("end"))
                    if rank != self.rank and not self._over.is_set():
                        self._store.add("told", 1)
                        self._over.set()
                        self._end(code)
            except RuntimeError:  # the connection is lost
                if not self._over.wait(_GRACE_S):
                    self._fail(_STORE_LOST)
                return
            self._answered = time.monotonic()

    def _watch_store(self) -> None:
        """Report a store that does not answer: calls to a store of a suspended process never return."""
        intervals = _Intervals()
        what = "the store at {}:{} does not answer: its host, rank 0 or torchrun, is suspended or cut off".format(
            *self._address
        )
        while not self._over.wait(_LOOK_S):
            silent = time.monotonic() - self._answered
            if silent >= _GIVE_UP_S:
                self._fail(f"{what}, for {silent / 60:.3g} minutes")
            elif intervals.due(silent) and self._first_here:
                print(f"waiting     {silent:.0f} s so far: {what}", file=sys.stderr, flush=True)

    def _fail(self, text: str) -> None:
        print(f"error: {text}", file=sys.stderr, flush=True)
        self._over.set()
        self._end(EXIT_FAILED)

    def _connection(self, host: bool = False) -> dist.TCPStore:
        """A new connection. torch retries, and warns of an unknown address."""
        limit = timedelta(seconds=_CONNECT_S)
        return dist.TCPStore(*self._address, is_master=host, wait_for_workers=False, timeout=limit)

    def _connect(self) -> dist.Store | None:
        """The store of this attempt; None if training has ended before.

        Raises ValueError if the address is unknown, if this process should host the store and cannot, or if ranks have
        another world size or the same number.
        """
        address, port = self._address
        tcp: dist.TCPStore | None = None
        while tcp is None and not self._over.is_set():
            try:
                tcp = self._connection(self.hosts_store)
            except RuntimeError as error:
                reason = " ".join(str(error).split("Exception raised from")[0].split())
                if self.hosts_store:
                    raise ValueError(
                        f"rank 0 cannot listen at MASTER_ADDR={address} with MASTER_PORT={port} ({reason}): another run,"
                        " or a second rank 0, may be there, or it is another machine's address. Give all ranks the"
                        " address of rank 0's node and a free port."
                    ) from error
                with as_value_error(
                    f"MASTER_ADDR={address!r} is not known on {socket.gethostname()}",
                    ": give the name or address of rank 0's node, as all nodes know it.",
                ):
                    socket.getaddrinfo(address, port)
        if tcp is None:
            return None
        store = dist.PrefixStore(self._prefix, tcp)
        store.add("come", 1)
        if store.add(f"rank {self.rank}", 1) > 1:
            self._problem = ValueError(
                f"two processes of this launch are rank {self.rank}: check RANK, or SLURM_PROCID, of the launch line."
            )
        size = store.compare_set("world size", "", str(self.world_size)).decode()
        if size != str(self.world_size):
            self._problem = ValueError(
                f"the ranks differ: the world size is {self.world_size} on rank {self.rank} and {size} on another."
                f" {_SAME}"
            )
        return store


def _describe(different: list[tuple[int, dict[str, tuple[Any, Any]]]]) -> str:
    """One line for all differences: (rank, {key: (rank 0's value, its own)}); a missing value is None."""
    keys = list(dict.fromkeys(key for _, found in different for key in found))
    parts = []
    for key in keys[:_SHOWN]:
        by_value: dict[str, list[int]] = {}
        for rank, found in different:
            if key in found:
                first, own = found[key]
                by_value.setdefault(_shown(own), []).append(rank)
        others = ", ".join(f"{value} on {ranks_in_words(ranks)}" for value, ranks in by_value.items())
        parts.append(f"{key} is {_shown(first)} on rank 0 and {others}")
    more = f"; and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"the ranks differ: {'; '.join(parts)}{more}. {_SAME}"


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."

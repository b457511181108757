"""Rendezvous of the launchers of all nodes, by torch.

Node 0 keeps the store, at the address that all nodes were given, and has the first ranks: who reads its log reads the
run. Torch itself numbers nodes by name.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread

from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    registry,
)

from .hosts import leads_here

JOIN_S = 600
"""Seconds that nodes may come apart."""
STRANGER_S = 20.0
"""Seconds in which a store at node 0's address has to answer, once somebody listens there."""
FIRST_LINE_S = 20.0
_HERE = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """How many nodes, which of them this is (from 0), and where node 0 listens."""

    count: int = 1
    number: int = 0
    host: str = _HERE
    port: int = 0
    """0, of one node alone: any that is free."""

    def rendezvous(self, say: Callable[[str], None]) -> RendezvousHandler:
        """Torch's, of these nodes. Waits for node 0 to listen.

        Raises ValueError: node 0 cannot listen there; DistError: it does not after JOIN_S, or something else does.
        """
        keeps = self.number == 0
        if not keeps:
            self._reach(say)
        elif self.count > 1 and not leads_here(self.host, self.port):
            raise ValueError(
                f"--master {self.host}:{self.port} does not lead to this node, which is node 0: give an address of this"
                " node, as the others know it, and a free port."
            )
        parameters = RendezvousParameters(
            "c10d",
            f"{self.host}:{self.port}",
            run_id=uuid.uuid4().hex if self.count == 1 else "megatron_fp8",  # the same on all nodes
            min_nodes=self.count,
            max_nodes=self.count,
            local_addr=self.host if keeps else socket.gethostname(),
            is_host=keeps,
            join_timeout=JOIN_S,
        )
        name_methods_at_once()
        try:
            found = registry.get_rendezvous_handler(parameters)
        except RendezvousError as error:
            if not keeps:
                raise
            raise ValueError(
                f"this node cannot listen at --master {self.host}:{self.port} ({_reason(error)}): give an address of this"
                " node and a free port."
            ) from error
        return found if self.count == 1 else _Numbered(found, self)

    def _reach(self, say: Callable[[str], None]) -> None:
        """Return when a launcher's store answers at node 0's address."""
        deadline = time.monotonic() + JOIN_S
        self._connect(deadline, say)
        until = time.monotonic() + STRANGER_S
        while not _is_store(
            self.host, self.port
        ):  # node 0 may just have tried its own address, or be about to end
            if time.monotonic() > until:
                raise DistError(
                    f"somebody listens at --master {self.host}:{self.port}, and is no launcher: no store answered in"
                    f" {STRANGER_S:.0f} s. Give an address of node 0, and a port that nothing else uses; if both are"
                    " right, look at node 0."
                )
            time.sleep(0.5)
            self._connect(deadline, say)

    def _connect(self, deadline: float, say: Callable[[str], None]) -> None:
        """Return when somebody listens at node 0's address."""
        with said_after(FIRST_LINE_S, say, f"node 0 to listen at {self.host}:{self.port}"):
            while True:
                try:
                    socket.create_connection((self.host, self.port), timeout=5).close()
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise DistError(
                            f"nobody listens at --master {self.host}:{self.port} after {JOIN_S / 60:.0f} minutes"
                            f" ({error.strerror or error}): is node 0 there, and is that its address and a port that"
                            " this node may reach?"
                        ) from error
                    time.sleep(0.5)
                else:
                    return


def _is_store(host: str, port: int) -> bool:
    """Whether a store of torch's answers there, as any does at once.

    Another process asks: torch tries again for a minute, hears no signal meanwhile, and prints its stacks.
    """
    child = os.fork()
    if child == 0:
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STRANGER_S)
            )
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + STRANGER_S
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                return status == 0
            time.sleep(0.02)
        return False
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def name_methods_at_once() -> None:
    """Have torch find the names of methods, which it records nine times a launch, without the source of all frames.

    It looks for that in all modules that are loaded: half a second and more, before and after the ranks run.
    """
    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


class _Numbered(RendezvousHandler):
    """A rendezvous whose nodes have the numbers that they were given."""

    def __init__(self, inner: RendezvousHandler, nodes: Nodes) -> None:
        self._inner, self._nodes = inner, nodes
        # Locks of a run's folders are known by it: no other launch has the same.
        self._run_id = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round. Raises ValueError if two nodes have one number."""
        info, number = self._inner.next_rendezvous(), self._nodes.number
        store = PrefixStore("numbered", info.store)  # of this round
        if store.add(f"node {number}", 1) > 1:
            raise ValueError(
                f"two nodes have --node-rank {number}: give each of the {self._nodes.count} its own."
            )
        if number == 0:
            store.set("run id", self._run_id)
        self._run_id = store.get("run id").decode()
        # Ranks make their own store on node 0: in one that launchers share, ranks that are started again meet the dead.
        # Each node knows node 0 by the name that it was given.
        found = RendezvousStoreInfo.build(number, store, self._nodes.host)
        place = RendezvousStoreInfo(self._nodes.host, found.master_port)
        return RendezvousInfo(info.store, number, info.world_size, place)

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return self._inner.shutdown()


@contextmanager
def said_after(seconds: float, say: Callable[[str], None], what: str) -> Iterator[None]:
    """Say what is waited for, after `seconds` and then at doubling intervals, from a thread."""
    over = Event()

    def tell() -> None:
        pause = so_far = seconds
        while not over.wait(pause):
            say(f"waiting     {so_far:.0f} s so far for {what}")
            pause, so_far = so_far, 2 * so_far

    thread = Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _reason(error: BaseException) -> str:
    """What torch was told by the system, without its own words and stack."""
    inner = error.__cause__ or error
    return " ".join(str(inner).split())[:200]

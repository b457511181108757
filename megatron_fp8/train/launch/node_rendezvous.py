"""Rendezvous of the launchers of all nodes, by torch.

Node 0 hosts the store, at the address given to all nodes, and has the first ranks, so its log has the run's output.
Torch itself would number nodes by name.
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
"""Longest time in seconds between the first node to join and the last."""
STRANGER_S = 20.0
"""Seconds within which a store must answer at node 0's address, once a process listens there."""
FIRST_LINE_S = 20.0
_HERE = "127.0.0.1"


@dataclass(frozen=True)
class Nodes:
    """Number of nodes, this node's number (from 0), and where node 0 listens."""

    count: int = 1
    number: int = 0
    host: str = _HERE
    port: int = 0
    """0, allowed for one node: any free port."""

    def rendezvous(self, say: Callable[[str], None]) -> RendezvousHandler:
        """Torch's rendezvous of these nodes. Waits for node 0 to listen.

        Raises ValueError if node 0 cannot listen there; DistError if after JOIN_S nothing, or no launcher, listens.
        """
        is_host = self.number == 0
        if not is_host:
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
            local_addr=self.host if is_host else socket.gethostname(),
            is_host=is_host,
            join_timeout=JOIN_S,
        )
        name_methods_at_once()
        try:
            handler = registry.get_rendezvous_handler(parameters)
        except RendezvousError as error:
            if not is_host:
                raise
            raise ValueError(
                f"this node cannot listen at --master {self.host}:{self.port} ({_reason(error)}): give an address of this"
                " node and a free port."
            ) from error
        return handler if self.count == 1 else _Numbered(handler, self)

    def _reach(self, say: Callable[[str], None]) -> None:
        """Wait until a launcher's store answers at node 0's address."""
        deadline = time.monotonic() + JOIN_S
        self._connect(deadline, say)
        until = time.monotonic() + STRANGER_S
        while not _is_store(self.host, self.port):  # node 0 may be testing its own address, or about to end
            if time.monotonic() > until:
                raise DistError(
                    f"a process listens at --master {self.host}:{self.port} that is no launcher: no store answered in"
                    f" {STRANGER_S:.0f} s. Give an address of node 0, and a port that nothing else uses; if both are"
                    " right, look at node 0."
                )
            time.sleep(0.5)
            self._connect(deadline, say)

    def _connect(self, deadline: float, say: Callable[[str], None]) -> None:
        """Wait until a process listens at node 0's address."""
        with said_after(FIRST_LINE_S, say, f"node 0 to listen at {self.host}:{self.port}"):
            while True:
                try:
                    socket.create_connection((self.host, self.port), timeout=5).close()
                except OSError as error:
                    if time.monotonic() > deadline:
                        raise DistError(
                            f"nothing listens at --master {self.host}:{self.port} after {JOIN_S / 60:.0f} minutes"
                            f" ({error.strerror or error}): is node 0 there, and is that its address and a port that"
                            " this node may reach?"
                        ) from error
                    time.sleep(0.5)
                else:
                    return


def _is_store(host: str, port: int) -> bool:
    """Whether one of torch's stores answers there.

    A child process asks: torch retries for a minute, handles no signals meanwhile and prints stacks.
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
    """Let torch find method names, which it records nine times a launch, without reading the source of all frames.

    Torch searches all loaded modules for the source: half a second and more, before and after the ranks run.
    """
    dynamic_rendezvous.get_method_name = _method_name


def _method_name(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


class _Numbered(RendezvousHandler):
    """A rendezvous with fixed node numbers."""

    def __init__(self, inner: RendezvousHandler, nodes: Nodes) -> None:
        self._inner, self._nodes = inner, nodes
        # Locks of a run's folders contain this id, which no other launch has.
        self._run_id = uuid.uuid4().hex

    def next_rendezvous(self) -> RendezvousInfo:
        """The next round. Raises ValueError if two nodes have one number."""
        info, number = self._inner.next_rendezvous(), self._nodes.number
        store = PrefixStore("numbered", info.store)  # one namespace per round
        if store.add(f"node {number}", 1) > 1:
            raise ValueError(
                f"two nodes have --node-rank {number}: give each of the {self._nodes.count} its own."
            )
        if number == 0:
            store.set("run id", self._run_id)
        self._run_id = store.get("run id").decode()
        # Ranks make their own store on node 0: in the launchers' store, restarted ranks would find the keys of dead
        # ones. Each node reaches node 0 by the configured name.
        store_info = RendezvousStoreInfo.build(number, store, self._nodes.host)
        address = RendezvousStoreInfo(self._nodes.host, store_info.master_port)
        return RendezvousInfo(info.store, number, info.world_size, address)

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
    """Report from a thread what is awaited, after `seconds` and then at doubling intervals."""
    over = Event()

    def report_wait() -> None:
        pause = so_far = seconds
        while not over.wait(pause):
            say(f"waiting     {so_far:.0f} s so far for {what}")
            pause, so_far = so_far, 2 * so_far

    thread = Thread(target=report_wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _reason(error: BaseException) -> str:
    """The system's error message, without torch's text and stack."""
    inner = error.__cause__ or error
    return " ".join(str(inner).split())[:200]

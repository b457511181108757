"""The store through which ranks find each other: torchrun's, or one that rank 0 makes.

torchrun has one TCP store for its ranks and uses it in every attempt (torch 2.13, although a comment there says that
each retry gets a new one). A rank first reads its peers' addresses there. After a restart these may be addresses of
dead ranks: gloo's connection is refused, or waits. So the keys of each attempt get their own prefix.

The attempt's number is known on one node only: with several nodes each torchrun counts the restarts of its own ranks.
Then torchrun must not share its store; the ranks make one themselves, on a new port each time.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

_ANSWER = timedelta(seconds=60)  # limit for an answer of a store that exists
_NAMED_S = 60.0  # limit for a name to resolve: some clusters start a node before its name is known


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


class Rendezvous:
    """Connects to the store of one attempt, at an address and a port.

    Attributes:
        agent: torchrun hosts the store, according to its variables.
        hosted: this process hosts the store, which ends with it.
    """

    def __init__(self, rank: int, address: str, port: int, environ: Mapping[str, str]) -> None:
        self.address, self.port = address, port
        self.agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.hosted = rank == 0 and not self.agent
        self._attempt = f"attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if self.agent else "ranks"
        self._server: dist.Store | None = None
        self._resolved = False
        self._unknown_since: float | None = None

    def connect(self) -> dist.Store | None:
        """A new connection to the attempt's keys; None if nothing listens there yet, or if the connection failed.

        Raises ValueError if the address does not resolve for a minute (a line reports that at once), or if this process
        should host the store and cannot listen there.
        """
        if not self._resolves():
            return None
        if self.hosted and self._server is None:
            self._server = self._serve()
        if not self._answers():
            return None
        try:
            store = dist.TCPStore(
                self.address, self.port, is_master=False, wait_for_workers=False, timeout=_ANSWER
            )
        except RuntimeError:  # when many ranks connect at once, some must retry
            return None
        return dist.PrefixStore(self._attempt, store)

    def _serve(self) -> dist.Store:
        try:
            return dist.TCPStore(
                self.address, self.port, is_master=True, wait_for_workers=False, timeout=_ANSWER
            )
        except RuntimeError as error:
            raise ValueError(
                f"rank 0 cannot listen on MASTER_PORT={self.port} ({' '.join(str(error).split())}): another run, or a "
                "second rank 0, may be there. Set MASTER_PORT to a free port on all ranks."
            ) from error

    def _resolves(self) -> bool:
        """Whether the address resolves here. Checked first, because torch would retry for long and print nothing."""
        if self._resolved:
            return True
        try:
            socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            unknown = (
                f"MASTER_ADDR={self.address!r} is not known on {socket.gethostname()} ({error.strerror})"
            )
            now = time.monotonic()
            if self._unknown_since is None:
                self._unknown_since = now
                print(f"waiting     {unknown}; trying for {_NAMED_S:.0f} s", file=sys.stderr, flush=True)
            if now - self._unknown_since >= _NAMED_S:
                raise ValueError(
                    f"{unknown}: give the name or address of rank 0's node, as all nodes know it."
                ) from error
            return False
        self._resolved = True
        return True

    def _answers(self) -> bool:
        """Whether something listens, by a plain socket: torch would print a stack for each refusal."""
        try:
            socket.create_connection((self.address, self.port), timeout=5).close()
        except OSError:
            return False
        return True

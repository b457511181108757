"""Ports for programs that are told where to listen."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports that the system gives to nobody else meanwhile; who sets SO_REUSEADDR, as torch does, can listen there.

    A port that was found free and let go may be another connection's by the time it is used.
    """
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield [one.getsockname()[1] for one in sockets]

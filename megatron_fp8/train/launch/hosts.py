"""Host names and addresses: which are valid, and which belong to this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack

_ANSWER_S = 5.0


def is_host(text: str) -> bool:
    """Whether a name server accepts it: not empty, no blanks, no label that is empty or too long."""
    if not text or not text.isprintable() or " " in text or "/" in text:
        return False
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def leads_here(host: str, port: int) -> bool:
    """Whether a connection to this address reaches this machine; True where that is unknown.

    If torch listens at another machine's address, it retries for a minute and prints a stack each time. An address that
    no local interface has may still lead here (a container's), so a connection is tried.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return True  # the connection reports an unknown name
    if any(_is_own(family, address) for family, *_, address in addresses):
        return True
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket(addresses[0][0]))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen()
            listener.settimeout(_ANSWER_S)
            client = sockets.enter_context(socket.create_connection((host, port), timeout=_ANSWER_S))
            client.sendall(b"?")
            peer = sockets.enter_context(listener.accept()[0])
            peer.settimeout(_ANSWER_S)
            return peer.recv(1) == b"?"
        except OSError:
            return False


def _is_own(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True

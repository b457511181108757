"""Host names and addresses: valid ones, and this machine's."""

from __future__ import annotations

import socket
from contextlib import ExitStack

_ANSWER_S = 5.0


def is_host(text: str) -> bool:
    """Whether a name server could be asked for it: not empty, no blanks, and no part that is empty or too long."""
    if not text or not text.isprintable() or " " in text or "/" in text:
        return False
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def leads_here(host: str, port: int) -> bool:
    """Whether who connects there reaches this machine; True where that cannot be told.

    Torch, told to listen at another machine's address, would try for a minute, with a stack for each time. An address
    that no interface has may still lead here, as a container's does: then it is tried.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return True  # a name that is not known is told elsewhere
    if any(_is_own(family, place) for family, *_, place in found):
        return True
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(found[0][0]))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen()
            listener.settimeout(_ANSWER_S)
            mine = opened.enter_context(socket.create_connection((host, port), timeout=_ANSWER_S))
            mine.sendall(b"?")
            theirs = opened.enter_context(listener.accept()[0])
            theirs.settimeout(_ANSWER_S)
            return theirs.recv(1) == b"?"
        except OSError:
            return False


def _is_own(family: int, place: tuple[object, ...]) -> bool:
    with socket.socket(family) as tried:
        try:
            tried.bind((place[0], 0, *place[2:]))
        except OSError:
            return False
    return True

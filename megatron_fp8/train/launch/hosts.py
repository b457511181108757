"""What may be the name or the address of a host."""

from __future__ import annotations


def is_host(text: str) -> bool:
    """Whether a name server could be asked for it: not empty, no blanks, and no part that is empty or too long."""
    if not text or not text.isprintable() or " " in text or "/" in text:
        return False
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True

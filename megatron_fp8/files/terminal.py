"""Text that others wrote, on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with what would steer a terminal spelled out: ``\x1b`` for escape. Line ends and tabs stay.

    Names in reports, checkpoints and directories come from files that others may have made.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)

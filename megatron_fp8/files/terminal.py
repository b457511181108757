"""Makes text from other users safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with terminal control characters escaped: ``\x1b`` for escape. Line ends and tabs stay.

    Names in reports, checkpoints and directories may come from other users' files.
    """
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in text)

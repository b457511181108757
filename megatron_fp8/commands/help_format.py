"""Wraps help text to a terminal of 80 columns.

Prose is rewrapped. Indented lines stay unchanged if they fit. If they do not, a second column continues below itself,
or below the first column if that is long; a command continues after a backslash.
"""

from __future__ import annotations

import re
import textwrap

WIDTH = 80
_SECOND_COLUMN = re.compile(r"^(\s*\S.*?\s{2,})(\S.*)$")
_MOST_LEFT = 40  # a longer first column has its explanation below it


def fit_help(text: str, width: int = WIDTH) -> str:
    """The text with no line longer than ``width``, except for single long words."""
    lines: list[str] = []
    prose: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line and not line.startswith(" "):
            prose.append(line)
            continue
        if prose:
            lines += textwrap.wrap(" ".join(prose), width, break_on_hyphens=False, break_long_words=False)
            prose = []
        lines += [line] if len(line) <= width else _wrap_indented(line, width)
    return "\n".join(lines[:-1])


def _wrap_indented(line: str, width: int) -> list[str]:
    columns = _SECOND_COLUMN.match(line)
    if columns is None:
        return _wrap_command(line, width)
    label, explanation = columns.groups()
    if len(label) > _MOST_LEFT:
        first = label.rstrip()
        head = [first] if len(first) <= width else _wrap_command(first, width)
        return [*head, *_wrap(explanation, " " * 6, " " * 6, width)]
    return _wrap(explanation, label, " " * len(label), width)


def _wrap_command(line: str, width: int) -> list[str]:
    """A command over several lines; options stay on the line of their values."""
    indent = " " * (len(line) - len(line.lstrip()))
    parts = re.split(r" (?=--|&&)", line.strip())
    lines, now = [], indent + parts[0]
    for part in parts[1:]:
        if len(now) + len(part) + 3 > width:
            lines.append(f"{now} \\")
            now = f"{indent}    {part}"
        else:
            now = f"{now} {part}"
    return [*lines, now]


def _wrap(text: str, first: str, other: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=other,
        break_on_hyphens=False,
        break_long_words=False,
    )

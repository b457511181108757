"""Advice shown on a report's page, from telemetry, a diagnosis or a user's file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..files.strict_json import load_json

_TITLES = ("title", "advice", "cause", "text")
_TO_PASTE = ("line", "lines", "config")


@dataclass(frozen=True)
class ShownAdvice:
    """One piece of advice: a title, config lines to paste, and all other fields by name."""

    title: str
    paste: tuple[str, ...]
    details: tuple[tuple[str, str], ...]


def read_advice(content: bytes, path: str) -> tuple[ShownAdvice, ...]:
    """Parses an advice.json: a list, or an object with a list under 'advice'. Raises ValueError."""
    try:
        found = load_json(content)
    except ValueError as error:
        raise ValueError(f"{path!r} is no JSON ({error}): correct it or remove it.") from error
    if isinstance(found, dict):
        found = found.get("advice")
    if not isinstance(found, list):
        raise ValueError(f"{path!r} has no list of advice: correct it or remove it.")
    return understood(found)


def understood(pieces: Iterable[Any]) -> tuple[ShownAdvice, ...]:
    """Parses pieces: strings, or objects with a title under 'title', 'advice', 'cause' or 'text' and config lines under
    'line'."""
    return tuple(_piece(piece) for piece in pieces)


def _piece(piece: Any) -> ShownAdvice:
    if not isinstance(piece, dict):
        return ShownAdvice(_words(piece), (), ())
    key = next((name for name in _TITLES if piece.get(name)), None)
    paste: list[str] = []
    for name in _TO_PASTE:
        value = piece.get(name) or []
        paste += [_words(line) for line in (value if isinstance(value, list) else [value])]
    rest = [
        (str(k), _words(v)) for k, v in piece.items() if k != key and k not in _TO_PASTE and v is not None
    ]
    return ShownAdvice(_words(piece[key]) if key else "Advice", tuple(paste), tuple(rest))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(v)}" for key, v in value.items())
    if isinstance(value, list):
        return ", ".join(_words(v) for v in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)

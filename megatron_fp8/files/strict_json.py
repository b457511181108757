"""Strict JSON: UTF-8, unique keys, bounded depth, NaN and Inf as words."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

_DEEPEST = 64
"""Objects and lists inside one another: Python's own limit, a thousand, is too deep for what is done with them next."""


def load_json(content: bytes, *, finite: bool = False) -> Any:
    """What the bytes say.

    Args:
        finite: NaN, Infinity and -Infinity, which Python writes and JSON has not, are refused, and so is 1e400, which it
            would read as infinity.

    Raises ValueError, in one line: it is no JSON, no UTF-8, a key stands twice, it has more than 64 levels, or a whole
    number beyond float64, with which nothing here computes.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is no UTF-8") from error
    try:
        found = json.loads(
            text,
            object_pairs_hook=_once,
            parse_constant=_refused if finite else None,
            parse_float=_finite if finite else None,
            parse_int=_whole,
        )
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    _check_depth(found)
    return found


_TOO_DEEP = f"it is nested deeper than {_DEEPEST} levels"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    return _refused(digits) if math.isinf(number) else number


def _whole(digits: str) -> int:
    number = int(digits)
    if abs(number) > sys.float_info.max:
        raise ValueError(f"{digits[:8]}... with {len(digits.lstrip('-'))} digits is too large a number")
    return number


def _check_depth(content: Any) -> None:
    level = [content]
    for _ in range(_DEEPEST):
        inner = [
            part
            for node in level
            if isinstance(node, (dict, list))
            for part in (node.values() if isinstance(node, dict) else node)
            if isinstance(part, (dict, list))
        ]
        if not inner:
            return
        level = inner
    raise ValueError(_TOO_DEEP)


def spelled_out(value: Any) -> Any:
    """Plain values as JSON can hold them: NaN, Infinity and -Infinity become texts, as in protobuf's JSON. Python's own
    `NaN` without quotes is an error to other readers, and null would not say which it was."""
    if isinstance(value, dict):
        return {name: spelled_out(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled_out(inner) for inner in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value

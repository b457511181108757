"""Strict JSON: UTF-8, unique keys, bounded depth, NaN and Inf as strings."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

_DEEPEST = 64
"""Limit of nested objects and lists: Python's own limit of a thousand is too deep for later processing."""


def load_json(content: bytes, *, finite: bool = False) -> Any:
    """Parse JSON.

    Args:
        finite: reject NaN, Infinity and -Infinity, which Python writes although JSON has none, and also 1e400, which it
            would read as infinity.

    Raises ValueError, in one line, if it is not JSON or not UTF-8, has a key twice or more than 64 levels, or has a
    whole number beyond float64.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of it is no UTF-8") from error
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_reject if finite else None,
            parse_float=_finite if finite else None,
            parse_int=_whole,
        )
        if _is_deeper(value, _DEEPEST):
            raise RecursionError
    except RecursionError as error:
        raise ValueError(f"it is nested deeper than {_DEEPEST} levels") from error
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return result


def _reject(constant: str) -> Any:
    raise ValueError(f"{constant} is no number")


def _finite(digits: str) -> float:
    number = float(digits)
    return _reject(digits) if math.isinf(number) else number


def _whole(digits: str) -> int:
    number = int(digits)
    if abs(number) > sys.float_info.max:
        raise ValueError(f"{digits[:8]}... with {len(digits.lstrip('-'))} digits is too large a number")
    return number


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None:
        return False
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def spelled_out(value: Any) -> Any:
    """Plain values with NaN, Infinity and -Infinity as strings, as in protobuf's JSON.

    Python's `NaN` without quotes is an error to other readers, and null would lose which value it was.
    """
    if isinstance(value, dict):
        return {name: spelled_out(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled_out(inner) for inner in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Strict JSON: UTF-8, unique keys, bounded depth, checked shapes, NaN and Inf as strings."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

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


def nonfinite_as_text(value: Any) -> Any:
    """Plain values with NaN, Infinity and -Infinity as strings, as in protobuf's JSON.

    Python's `NaN` without quotes is an error to other readers, and null would lose which value it was.
    """
    if isinstance(value, dict):
        return {name: nonfinite_as_text(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [nonfinite_as_text(inner) for inner in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------------------- shapes


class Kind(NamedTuple):
    """A kind of value: a test, and what it asks for in words."""

    holds: Callable[[Any], bool]
    words: str


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 to 2**63 - 1."""
    return type(value) is int and 0 <= value < 2**63


COUNT = Kind(is_count, "a whole number from 0")
_WORDS = {
    str: "a text", int: "a whole number", bool: "true or false", dict: "an object", list: "a list", type(None): "null",
}  # fmt: skip


def check_shape(value: Any, shape: Any, name: str = "") -> None:
    """Raise ValueError, which names the field, unless a value of JSON has this shape. Other fields are ignored.

    Args:
        shape: a type, ``object`` for any value, None, a ``Kind``, a list of one shape, an object's fields (a name with
            '?' may be missing, '*' means every name), or a tuple of shapes of which one must fit.
        name: the value's dotted name; '' for the whole content.
    """
    shapes = shape if type(shape) is tuple else (shape,)
    for kind in shapes:
        if isinstance(kind, Kind):
            fits = kind.holds(value)
        elif isinstance(kind, (dict, list)) and type(value) is type(kind):
            _check_parts(value, kind, name)
            return
        else:
            fits = kind is object or type(value) is kind or (value is None and kind is None)
        if fits:
            return
    words = " or ".join(
        kind.words if isinstance(kind, Kind) else _WORDS[kind if isinstance(kind, type) else type(kind)]
        for kind in shapes
    )
    raise ValueError(f"{name or 'it'} is {str(value)[:60]!r}, and that is {words}")


def _check_parts(value: Any, shape: Any, name: str) -> None:
    if isinstance(shape, list):
        for number, item in enumerate(value, 1):
            check_shape(item, shape[0], f"{name}[{number}]")
        return
    for key, inner in shape.items():
        for field in value if key == "*" else (key.removesuffix("?"),):
            dotted = f"{name}.{field}".removeprefix(".")
            if field in value:
                check_shape(value[field], inner, dotted)
            elif field == key:
                raise ValueError(f"it has no {dotted}")

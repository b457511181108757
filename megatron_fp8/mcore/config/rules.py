"""Rules for settings, as data: valid values, and their description."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...plan.settings import exchange_hint


@dataclass(frozen=True)
class Rule:
    """`words` complete the sentence "NAME=VALUE must be ..."; `holds(value)` returns whether the value is valid."""

    words: str
    holds: Callable[[Any], bool]
    names: tuple[str, ...] = ()
    """The valid names; a message suggests the nearest one."""
    edges: tuple[float, ...] = ()
    """The smallest and the largest valid number."""


def check(name: str, value: Any, rule: Rule, remedy: str = "change it, or leave it out") -> None:
    """Raises ValueError, one line with the setting, its value, the rule and the remedy, unless `rule` holds."""
    if not rule.holds(value):
        near = difflib.get_close_matches(str(value).lower(), rule.names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        remedy = exchange_hint(name, value) or remedy
        raise ValueError(f"{name}={format_value(value)} must be {rule.words}: {remedy}.{hint}")


def format_value(value: Any) -> str:
    """Formats a value for a message: a long one is truncated."""
    text = repr(value.name if isinstance(value, Enum) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer(low: int, high: int, unit: str = "") -> Rule:
    """A whole number (not a bool) from `low` to `high`, both included."""
    words = f"a whole number of at least {low:,} and at most {high:,}{' ' if unit else ''}{unit}"
    return Rule(words, lambda v: _is_integer(v) and low <= v <= high, edges=(low, high))


def number(low: float, high: float = math.inf, *, without: Iterable[float] = ()) -> Rule:
    """A finite number from `low` to `high`; bounds in `without` are excluded, as is infinity."""
    left_out = {low, high} & set(without)
    words = f"a finite number {'above' if low in left_out else 'of at least'} {low:g}"
    if high < math.inf:
        words += f" and {'below' if high in left_out else 'at most'} {high:g}"
    return Rule(words, lambda v: _is_finite(v) and low <= v <= high and v not in left_out, edges=(low, high))


FLAG = Rule("true or false", lambda v: isinstance(v, bool) or (_is_integer(v) and v in (0, 1)))
SIZE, COUNT = integer(1, 2**24), integer(1, 2**16)
RANKS = integer(1, 2**20, "ranks")
PROBABILITY = number(0, 1, without=[1])
FLOAT32 = 3.4e38  # above it float32, the dtype of masters, scales and most factors, has only infinity
LEAST = 1e-37  # below it only zero
POSITIVE, NOT_NEGATIVE, ANY_NUMBER = number(LEAST, FLOAT32), number(0, FLOAT32), number(-FLOAT32, FLOAT32)


def text(words: str = "text without NUL") -> Rule:
    """A string that is not blank and has no NUL, which no file name and no C library accepts."""
    return Rule(words, lambda v: isinstance(v, str) and "\0" not in v and bool(v.strip()))


def one_of(*choices: str) -> Rule:
    """One of these names; an enum's member counts as its name."""
    return Rule(
        f"one of {', '.join(map(repr, choices))}",
        lambda v: isinstance(v, str | Enum) and (v.name if isinstance(v, Enum) else v) in choices,
        choices,
    )


def optional(rule: Rule) -> Rule:
    """`rule`, or None."""
    return Rule(f"{rule.words}, or null", lambda v: v is None or rule.holds(v), rule.names, rule.edges)


def either(*rules: Rule) -> Rule:
    """A value for which any of `rules` holds."""
    return Rule(", or ".join(rule.words for rule in rules), lambda v: any(rule.holds(v) for rule in rules))


def list_of(rule: Rule, length: int | None = None) -> Rule:
    """A list (or tuple) of items for which `rule` holds; with exactly `length` items if given."""
    size = f"{length} items" if length else "items"
    return Rule(
        f"a list of {size}, each {rule.words}",
        lambda v: (
            isinstance(v, list | tuple) and length in (None, len(v)) and all(rule.holds(item) for item in v)
        ),
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer beyond float's range
        return False


@dataclass(frozen=True)
class Relation:
    """A condition on several settings. `holds` gets an object with them as attributes."""

    names: tuple[str, ...]
    words: str
    holds: Callable[[Any], bool]


def check_relation(settings: Any, relation: Relation, before: str = "") -> None:
    """Raises ValueError, one line with the settings, values, rule and remedy, unless the relation holds."""
    if not relation.holds(settings):
        values = ", ".join(
            f"{before}{name}={format_value(getattr(settings, name))}" for name in relation.names
        )
        raise ValueError(f"{values}: {relation.words}. Change one of them.")

"""Values that settings are tried with: what people mistype, what overflows, and the edges of a rule."""

import math

NONSENSE = [
    None, True, False, -1, 0, 1, 2, 3, 7, 10**9, 2**31, 2**63, -(2**63), 10**400, 0.5, 1.5, -0.0, 1e-300, 1e300,
    math.nan, math.inf, -math.inf, "", " ", "x", "null", "ü\n", "a\0b", b"x", [], [1], [[]], ["x", None], {}, {"a": 1},
]  # fmt: skip

WRITTEN = [
    "", " ", "null", "true", "-1", "0", "1", "3", "7", "nan", ".nan", ".inf", "-.inf", "1e400", "1e-300", "1e11",
    "9223372036854775808", "0x10", "1_000", "[]", "[1]", "[null]", "[[]]", "{}", "{a: 1}", "{", "&a *a", "!!python/x 1",
    "ü", "\u202e", "text", "'", "?", "- 1", "a: b: c", "on", "2026-11-21", "~", "long" * 100,
]  # fmt: skip
"""As text on a command line."""


def edges(rule):
    """The least and the largest value that a rule admits, and those beyond."""
    return [value for edge in rule.edges for value in (edge - 1, edge, edge + 1)]

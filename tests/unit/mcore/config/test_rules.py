"""Rules: what they admit, and what a message says."""

import enum
import math

import numpy as np
import pytest

from megatron_fp8.mcore.config.rules import (
    FLAG,
    Relation,
    check,
    check_relation,
    either,
    integer,
    list_of,
    number,
    one_of,
    optional,
    text,
)

NONSENSE = [None, "", "x", b"x", [], {}, [1], math.nan, math.inf, -math.inf, object(), 10**400, -(2**63)]


class Colour(enum.Enum):
    red = 1


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (integer(1, 8), [1, 8, np.int64(3)], [0, 9, 1.0, True]),
        (number(0, 1, without=[1]), [0, 0.5, np.float32(0.25)], [1, -1e-9, True, "0.5"]),
        (number(0, without=[0]), [1e-300, 1e300, 3], [0, -0.0]),
        (FLAG, [True, False, 1, 0], [2, "true"]),
        (text(), ["a", "ü", "x"], [" ", "a\0b"]),
        (one_of("red", "blue"), ["red", "blue", Colour.red], ["green", 1]),
        (optional(integer(1, 2)), [1, None], [0]),
        (either(integer(1, 2), list_of(integer(0, 1))), [2, [0, 1], [], [1]], [3, [2]]),
        (list_of(integer(0, 1), 2), [[0, 1], (1, 1)], [[0], [0, 1, 1], "01"]),
    ],
)
def test_what_a_rule_admits(rule, good, bad):
    for value in good:
        check("x", value, rule)
    for value in [*bad, *(value for value in NONSENSE if repr(value) not in map(repr, good))]:
        with pytest.raises(ValueError, match="must be") as error:
            check("x", value, rule)
        assert "\n" not in str(error.value)


def test_a_message_names_value_rule_and_remedy():
    with pytest.raises(ValueError) as error:
        check("train.seed", -1, integer(0, 5, "seeds"), "lower it")
    assert str(error.value) == (
        "train.seed=-1 must be a whole number of at least 0 and at most 5 seeds: lower it."
    )
    with pytest.raises(ValueError, match=r"Did you mean 'mxfp8'\?"):
        check("fp8_recipe", "mxfp9", optional(one_of("delayed", "mxfp8")))
    with pytest.raises(ValueError) as error:
        check("x", "y" * 1000, integer(0, 1))
    assert len(str(error.value)) < 200


def test_a_relation_names_all_its_settings():
    class Two:
        a, b = 3, 2

    with pytest.raises(ValueError, match=r"^s\.a=3, s\.b=2: a is at most b\. Change one of them\.$"):
        check_relation(Two, Relation(("a", "b"), "a is at most b", lambda s: s.a <= s.b), "s.")
    check_relation(Two, Relation(("a", "b"), "a is above b", lambda s: s.a > s.b))

"""How many inputs hypothesis draws: `@draws(60)` above `@given` draws 60, twenty times as many in `make test-long`.

The 60 are the same in every run, so that `make test` fails because of a change and never by chance; those of
`make test-long` are new each time, by a seed that it says (`make test-long SEED=...` draws the same ones again). A
failure prints its input, and a line (`@reproduce_failure`) that draws this one alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

TIMES = int(os.environ.get("DRAWS_TIMES", "1"))


def draws(count: int, *, often: int = 1, **options: Any) -> Callable[[Any], Any]:
    """`hypothesis.settings` with that many inputs, and the mark by which `make test-long` finds the test.

    `often`: `make test-long` draws that many times more again, of inputs that take too long for more in `make test`.
    """
    long = TIMES > 1
    drawn = settings(
        max_examples=count * TIMES * (often if long else 1), derandomize=not long, deadline=None,
        print_blob=True, **options,
    )  # fmt: skip
    return lambda test: pytest.mark.draws(drawn(test))

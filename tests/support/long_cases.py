"""Cases of which `make test` runs some and `make test-long` all.

@pytest.mark.parametrize("name", some(CASES, "tp2", "pp2"))
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], *here: Any) -> list[Any]:
    """Parameters for `parametrize`: all but those of `here` have the mark `long`."""
    found = list(cases)
    assert here and set(here) <= set(found), f"no cases: {set(here) - set(found)}"
    return [pytest.param(*_values(case), marks=() if case in here else pytest.mark.long) for case in found]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)

"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(n).run(case, *args, timeout=120)`: gloo ranks shared by the whole session (tests/ranks.py)."""
    pool = RankPool()
    yield pool
    pool.close()

"""Fixtures for all tests."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton kernels are interpreted; Triton's own functions are too, if it is told before anybody imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Iterator

import pytest

from benchmarks.support import forking
from benchmarks.support.ranks import RankPool
from tests.support.interpreter import lean_interpreter

lean_interpreter()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks(n).run(case, *args, timeout=120)`: gloo ranks shared by the whole session (benchmarks/support/ranks.py)."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def forking_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path of a `python` that forks what it runs (benchmarks/support/forking.py)."""
    with forking.forking_python(tmp_path_factory.mktemp("python")) as path:
        yield path

"""These files run in processes that test_transformer_engine.py starts, with a real Transformer Engine in each."""

from __future__ import annotations

import os

import pytest

FOLDER = os.environ.get("TRANSFORMER_ENGINE")

if FOLDER is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.support.te import engine

    EXTENSION = engine.install(FOLDER)


@pytest.fixture
def extension() -> engine.Stub:
    """The stub of the compiled extension."""
    return EXTENSION

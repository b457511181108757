"""The native backend's kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sites import NATIVE_RECIPES as RECIPES

BY_BLOCKS = ("delayed", "rowwise", "blockwise", "mxfp8")
CHECKS = [
    *(f"same bits: {name}" for name in RECIPES),
    *(f"linear: {name}" for name in BY_BLOCKS),
    *(f"recorded straight: {name}" for name in RECIPES),
    *(
        "given scale",
        "shared amaxes",
        "kernels dispatched",
        "rules without a kernel",
        "blocks that torch lacks",
        "grouped blocks",
        "grouped sizes: rowwise",
        "grouped sizes: mxfp8",
        *(f"experts' tokens: {name}" for name in BY_BLOCKS),
        "blocks as mx",
        "transposed views",
    ),
]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    """What went wrong in each check that runs kernels: one process, since Triton decides once whether it interprets."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_cases"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_every_check_has_run(interpreted: dict[str, str]):
    assert set(interpreted) == set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_with_interpreted_kernels(interpreted: dict[str, str], check: str):
    if interpreted[check]:
        pytest.fail(interpreted[check])

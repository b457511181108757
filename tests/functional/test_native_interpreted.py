"""The native backend's kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_with_interpreted_kernels() -> None:
    """All checks of tests/support/interpreted_cases.py in one process: Triton decides once whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_cases"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 25
    wrong = [f"{check}\n{said}" for check, said in found.items() if said]
    assert not wrong, "\n".join(wrong)

"""A run that is stopped, stands still, is killed and finds its newest checkpoint damaged ends as if nothing had been.

`python -m benchmarks.soak` does it for 2,000 iterations with forty faults of eight kinds (benchmarks/results/soak.md).
"""

import random

from benchmarks import kills
from benchmarks.soak import soak


def test_a_disturbed_run_ends_at_the_same_bits(tmp_path, forking_python, monkeypatch):
    monkeypatch.setattr(kills, "FINISH_S", 240.0)
    planned = [(3, "stop"), (4, "pause"), (6, "damage")]
    faults, different, last = soak(tmp_path, planned, 8, 2, random.Random(5), forking_python)
    assert [fault.kind for fault in faults] == ["stop", "pause", "damage"]
    assert faults[0].resumed >= 3 and faults[1].resumed is None
    assert 2 <= faults[2].resumed <= 6 and faults[2].how.endswith("; refused: exit code 2")
    assert last["iteration"] == 8 and not different

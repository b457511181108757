"""Ranks killed with SIGKILL: the run restarts from the newest complete checkpoint and ends as if nothing had happened.

`python -m benchmarks.kills` does it twenty times to real processes; here is one kill of each kind, of forked ones.
"""

import random

import pytest

from benchmarks import kills as kills_module
from benchmarks.kills import NVFP4, lost, play


@pytest.mark.parametrize(
    "options", [(), pytest.param(NVFP4, marks=pytest.mark.long)], ids=["delayed", "nvfp4"]
)
def test_a_killed_run_goes_on_from_the_newest_complete_checkpoint_to_the_same_bits(
    tmp_path, forking_python, monkeypatch, options
):
    monkeypatch.setattr(kills_module, "FINISH_S", 240.0)
    moments = ["save", "starting"]
    dice = random.Random(3)
    kills, different = play(
        tmp_path, moments, iterations=12, dice=dice, python=forking_python, options=options
    )
    assert [kill.moment for kill in kills] == moments
    assert not any(map(lost, kills)), kills
    assert kills[-1].resumed and kills[-1].resumed >= 2
    assert not different

"""The committed counts of instructions: whole, and at the goal."""

import json

import pytest

from benchmarks import instructions
from benchmarks.common import RESULTS

KEPT = json.loads((RESULTS / "instructions.json").read_text())
PAGE = (RESULTS / "instructions.md").read_text()


def test_every_kernel_is_counted_for_both_devices():
    works = instructions.works()
    assert len({work.name for work in works}) == len(works) > 30
    for device in instructions.DEVICES:
        names = [work.name for work in works if work.architecture <= device.architecture]
        assert [c["name"] for c in KEPT["results"] if c["device"] == device.name] == names
    assert "triton" in KEPT["environment"]["versions"] and "no GPU ran it" in PAGE


@pytest.mark.parametrize(
    "count", [c for c in KEPT["results"] if c["device"] == "H200"], ids=lambda c: c["name"]
)
def test_the_goal_is_met(count):
    assert count["ratio"] <= 0.75 and not count["spilled"] and count["programs"] >= 2 and count["meets"]


def test_no_kernel_spills():
    assert [c["name"] for c in KEPT["results"] if c["spilled"] or c["programs"] < 2] == []

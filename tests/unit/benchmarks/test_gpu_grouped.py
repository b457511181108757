"""torch's grouped product, which native does not use, as the GPU's check and benchmark try it: by a strict stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_grouped
from benchmarks.gpu_common import Clock, Machine, NotRun
from benchmarks.gpu_kernels import Bench
from tests.support.scaled_mm import fake_torch


def machine() -> Machine:
    return Machine(torch.device("cpu"), True)


@pytest.mark.parametrize("name", gpu_grouped.NAMES)
def test_the_check(name: str) -> None:
    """An expert without tokens among them; a wrong product fails, a missing one is said to be."""
    with fake_torch() as fake:
        said = gpu_grouped.grouped_product(machine(), name)
        assert fake.calls == {"grouped": 1} and "the single ones by" in said
    with fake_torch(wrong="grouped"), pytest.raises(AssertionError, match="off by"):
        gpu_grouped.grouped_product(machine(), name)
    with (
        fake_torch(refuse={"grouped": "not on this GPU"}),
        pytest.raises(NotRun, match="none: not on this GPU"),
    ):
        gpu_grouped.grouped_product(machine(), name)


@pytest.mark.parametrize(("options", "timed"), [({}, True), ({"wrong": "grouped"}, False)])
def test_the_section(options: dict[str, Any], timed: bool) -> None:
    """What is wrong is not timed, and fails the section."""
    here = machine()
    bench = Bench(here, Clock(here), 1)
    with fake_torch(**options):
        gpu_grouped.products(bench)
    found = {row["contender"]: row["median_s"] for row in bench.rows}
    labels = ("in turn", "torch grouped", "torch grouped, codes put together")
    ours = {f"{name}, {label}": label == "in turn" or timed for name in gpu_grouped.NAMES for label in labels}
    wanted = {"bf16, in turn", "bf16, grouped"} | {label for label, there in ours.items() if there}
    assert set(found) == wanted and all(found.values())
    assert bool(bench.wrong) != timed

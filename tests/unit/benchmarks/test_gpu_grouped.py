"""Products of experts in one launch, as the GPU's check and benchmark try them: torch's by a strict stand-in, this
package's kernel interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import gpu_grouped
from benchmarks.gpu_common import Clock, Machine, NotRun
from benchmarks.gpu_kernels import Bench
from megatron_fp8.kernels import block_matmul
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


IN_TURN = {"bf16, in turn", "bf16, grouped", "rowwise, in turn", "mxfp8, in turn", "blockwise, in turn"}
BY_TORCH = {
    f"{name}, {label}"
    for name in gpu_grouped.NAMES
    for label in ("torch grouped", "torch grouped, codes put together")
}
BY_KERNEL = {"blockwise, own grouped kernel"}


def section() -> tuple[set[str], dict[str, str], list[str]]:
    """What was timed, what was skipped and why, and what was wrong."""
    here = machine()
    bench = Bench(here, Clock(here), 1)
    gpu_grouped.products(bench)
    timed = {row["contender"] for row in bench.rows if row["median_s"]}
    skipped = {row["contender"]: row["rate"] for row in bench.rows if row["median_s"] is None}
    return timed, skipped, bench.wrong


@pytest.mark.parametrize(("options", "timed"), [({}, BY_TORCH), ({"wrong": "grouped"}, set())])
def test_the_section(options: dict[str, Any], timed: set[str]) -> None:
    """What is wrong is not timed, and fails the section."""
    with fake_torch(**options):
        found, skipped, wrong = section()
    assert found == IN_TURN | BY_KERNEL | timed and not skipped
    assert bool(wrong) != bool(timed)


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(first: Any, products: Any, **options: Any) -> None:
        real(first, products, **options)
        products[-1].out.mul_(0.5)

    real = block_matmul.grouped_block_matmul
    monkeypatch.setattr(block_matmul, "grouped_block_matmul", halved)
    with fake_torch():
        found, _, wrong = section()
    assert found == IN_TURN | BY_TORCH
    assert [said.partition(":")[0] for said in wrong] == [
        "expert products 4 experts blockwise, own grouped kernel"
    ]


def test_without_a_gpu_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dry run from the command line, which interprets nothing."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with fake_torch():
        found, skipped, _ = section()
    assert found == IN_TURN | BY_TORCH
    assert skipped == {"blockwise, own grouped kernel": "dry run: needs a GPU"}

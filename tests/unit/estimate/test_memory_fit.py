"""Whether a run fits, and the change that makes it."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_fp8.estimate.device import Device, device
from megatron_fp8.estimate.estimate import estimate
from megatron_fp8.estimate.memory_fit import fit, layout
from megatron_fp8.estimate.settings import LayoutError, Settings, read

TINY = "--config=examples/configs/tiny_gpt_cpu.yaml"
WHOLE = [
    TINY,
    "--model.tensor_model_parallel_size=1",
    "--model.sequence_parallel=false",
    "--train.global_batch_size=64",
]


def of_size(memory: float) -> Device:
    return dataclasses.replace(device("h100"), memory=int(memory))


@pytest.fixture(scope="module")
def settings() -> Settings:
    return read(WHOLE, gpus=8)


def test_the_change_that_is_named_fits(settings: Settings) -> None:
    there = of_size(1e12)
    needed = estimate(settings, there).fullest.total
    assert fit(estimate(settings, there), there).fits
    for part in (0.9, 0.6, 0.3, 0.15):
        small = of_size(needed * part)
        found = fit(estimate(settings, small), small, reserve=0.0)
        assert not found.fits and found.change is not None and found.changed is not None
        again = read([*WHOLE, *found.change], gpus=8)
        assert estimate(again, small).fullest.total == found.changed <= small.memory


def test_splitting_comes_first_then_recomputation() -> None:
    settings = read([TINY], gpus=2)  # two ranks, split already
    there = of_size(1e12)
    needed = estimate(settings, there).fullest.total
    small = of_size(needed * 0.7)
    found = fit(estimate(settings, small), small, reserve=0.0)
    assert found.change and found.change[0].startswith("--model.recompute_granularity")


def test_nothing_is_promised_that_does_not_fit(settings: Settings) -> None:
    tiny = of_size(1000)
    found = fit(estimate(settings, tiny), tiny)
    assert not found.fits and found.change is None and found.smallest > 1000


@pytest.mark.parametrize("config, gpus", [("qwen3_30b_a3b", 8), ("llama3_8b", 1)])
def test_gpus_that_the_layout_does_not_fit_get_one_that_does(config: str, gpus: int) -> None:
    there = of_size(80e9 if gpus > 1 else 400e9)
    with pytest.raises(LayoutError):
        read([f"--config={config}"], gpus=gpus)
    options = layout(read([f"--config={config}"]), gpus, there)
    assert options is not None
    again = read([f"--config={config}", *options], gpus=gpus)
    assert fit(estimate(again, there), there).fits


def test_no_layout_is_named_that_does_not_fit() -> None:
    assert layout(read(["--config=llama3_8b"]), 2, of_size(1e9)) is None


@pytest.mark.parametrize("gpus, tensor", [(None, 1), (1, 1), (2, 2)])
def test_a_tensor_parallel_size_of_auto_is_that_of_the_gpus(gpus: int | None, tensor: int) -> None:
    model = read([TINY], gpus=gpus).model
    assert (model.tensor_model_parallel_size, model.sequence_parallel) == (tensor, tensor > 1)

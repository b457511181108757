"""Whether a run fits, and the change that makes it."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_fp8.estimate.config_reader import Settings, read
from megatron_fp8.estimate.device import Device, device
from megatron_fp8.estimate.estimate import estimate
from megatron_fp8.estimate.memory_fit import check_fit

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
    assert check_fit(estimate(settings, there), there).fits
    for part in (0.9, 0.15):
        small = of_size(needed * part)
        found = check_fit(estimate(settings, small), small, reserve=0.0)
        assert not found.fits and found.change is not None and found.changed is not None
        again = read([*WHOLE, *found.change], gpus=8)
        assert estimate(again, small).fullest.total == found.changed <= small.memory


def test_splitting_comes_first_then_recomputation() -> None:
    settings = read([TINY], gpus=2)  # two ranks, split already
    there = of_size(1e12)
    needed = estimate(settings, there).fullest.total
    small = of_size(needed * 0.7)
    found = check_fit(estimate(settings, small), small, reserve=0.0)
    assert found.change and found.change[0].startswith("--model.recompute_granularity")


def test_nothing_is_promised_that_does_not_fit(settings: Settings) -> None:
    tiny = of_size(1000)
    found = check_fit(estimate(settings, tiny), tiny)
    assert not found.fits and found.change is None and found.smallest > 1000


@pytest.mark.parametrize("gpus, tensor", [(None, 1), (1, 1), (2, 2)])
def test_a_tensor_parallel_size_of_auto_is_that_of_the_gpus(gpus: int | None, tensor: int) -> None:
    model = read([TINY], gpus=gpus).model
    assert (model.tensor_model_parallel_size, model.sequence_parallel) == (tensor, tensor > 1)

"""Delayed scaling simulated, against a history kept one number at a time."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.recipe import DelayedScaling, Float8CurrentScaling
from megatron_fp8.study.formats.delayed import MAGNITUDES, SETTINGS, simulate


@pytest.mark.parametrize("length, margin", [(1, 0), (4, 2)])
def test_scales_are_those_of_the_largest_remembered(length, margin):
    sizes = [1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 0.25, 1.0]
    generator = torch.Generator().manual_seed(0)
    amaxes = [float((torch.randn(1, 4096, generator=generator) * size).abs().max()) for size in sizes]
    steps = simulate(DelayedScaling(amax_history_len=length, margin=margin), sizes)
    for i, step in enumerate(steps):
        # The first has no history and scales by its own amax; a history of n keeps the n latest.
        seen = amaxes[max(0, i - length) : i] if i else amaxes[:1]
        assert step.scale == pytest.approx(448 / 2.0**margin / max(seen), rel=1e-6), i


def test_a_jump_saturates_once_and_is_remembered_as_long_as_the_history():
    steps = simulate(SETTINGS["history 16, margin 0"], MAGNITUDES["spiky"])
    assert steps[20].saturated > 0.99 and steps[20].sqnr < 1
    assert all(step.sqnr < 15 and step.flushed > 0.1 for step in steps[21:37])
    assert steps[38].sqnr > 30


def test_a_margin_takes_in_growth():
    def saturated(name):
        return sum(step.saturated > 0 for step in simulate(SETTINGS[name], MAGNITUDES["growing"]))

    assert saturated("history 16, margin 0") > 40 and saturated("history 16, margin 1") == 0


def test_without_a_delay_nothing_saturates():
    assert not any(step.saturated for step in simulate(Float8CurrentScaling(), MAGNITUDES["spiky"]))

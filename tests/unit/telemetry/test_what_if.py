"""Codes in other recipes: those of the recipe itself, and delayed scales from a history of their own."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.numerics.formats import E2M1, E4M3, E5M2
from megatron_fp8.recipe import RECIPES, DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from megatron_fp8.telemetry.stat_registry import QUANTIZED, WHAT_IF
from megatron_fp8.telemetry.tensor_stats import Layout, finish, measure
from megatron_fp8.telemetry.what_if import WhatIfHistory, what_if
from tests.support.delayed import PlainSlot
from tests.support.draws import draws
from tests.support.matrices import mixed

CPU = torch.device("cpu")


@pytest.mark.parametrize("prefix", WHAT_IF)
def test_codes_are_those_of_the_recipe(prefix):
    x = mixed((70, 130), torch.bfloat16).cpu()
    for role in QUANTIZED:
        recipe = RECIPES[WHAT_IF[prefix]]()
        if prefix == "nvfp4":
            recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)
        expected = quantize(x, recipe, role, "both")
        found = what_if(x, prefix, role, direction="both")
        for mine, theirs in zip(found.sides, expected.sides, strict=True):
            assert_same_bytes(mine.codes.view(torch.uint8), theirs.codes.view(torch.uint8), prefix)
            assert_same_bytes(mine.float_scale_inv(), theirs.float_scale_inv(), prefix)


def test_the_runs_format_is_kept():
    x = torch.randn(8, 64, device="cpu")
    for fmt in (E4M3, E5M2):
        assert what_if(x, "mxfp8", "grad_output", fmt=fmt).rowwise.fmt is fmt
        assert what_if(x, "nvfp4", "grad_output", fmt=fmt).rowwise.fmt is E2M1
    assert what_if(x, "mxfp8", "grad_output", fmt=E2M1).rowwise.fmt is E4M3


@draws(30)
@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.0, math.inf, 1e-45, 0.5, 3.0, 448.0, 3e38]), min_size=3, max_size=3)
    )
)
def test_histories_go_by_the_rules_of_delayed_scaling(iterations):
    """Against one number at a time: unseen tensors, infinite amaxes, and cold starts."""
    history = WhatIfHistory(E5M2, 3, CPU)
    plain = [PlainSlot(DelayedScaling(), E5M2.max) for _ in range(3)]
    for iteration, amaxes in enumerate(iterations):
        history.update(torch.tensor(amaxes, dtype=torch.float32, device="cpu"))
        for index, (slot, amax) in enumerate(zip(plain, amaxes, strict=True)):
            slot.update(float(np.float32(amax)), iteration)
            scale = history.scale(index)
            assert (scale is not None) == slot.warm
            if scale is not None:
                assert_same_bytes(scale, np.float32(slot.scale), f"iteration {iteration}, tensor {index}")


def test_iterations_that_are_not_measured_count():
    """A spike that nobody measured stays in the history: the scale that follows from it flushes what comes after."""
    history = WhatIfHistory(E4M3, 1, CPU)
    for amax in (1.0, 1e5, 1.0):
        history.update(torch.tensor([amax], device="cpu"))
    x = torch.linspace(-1, 1, 640, device="cpu").reshape(10, 64)
    layout = Layout.of(
        ["underflows%", "fp8_delayed_scaling_underflows%", "fp8_delayed_scaling_scale_inv_max"]
    )
    codes = {
        "": quantize(x, Float8CurrentScaling(), "input"),
        "fp8_delayed_scaling": what_if(x, "fp8_delayed_scaling", "input", scale=history.scale(0)),
    }
    found = finish(layout, *measure(x, layout, codes))
    assert found["fp8_delayed_scaling_scale_inv_max"] == pytest.approx(1e5 / 448, rel=1e-6)
    assert found["underflows%"] == 0 and found["fp8_delayed_scaling_underflows%"] > 5

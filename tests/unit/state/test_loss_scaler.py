"""The loss scale: a worked example, the bounds, the state, and what unscaling does to gradients."""

from __future__ import annotations

import json
import math
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.state.loss_scaler import STUCK, LossScaler, agree, unscale_

PAGE = Path(__file__).parents[3] / "docs" / "unstable.md"


# Of each step: did it overflow; the scale in it; overflows in a row, clean steps, skipped steps and scale after it.
STEPS = [
    (False, 64, 0, 1, 0, 64),
    (True, 64, 1, 0, 1, 64),
    (False, 64, 0, 1, 1, 64),
    (True, 64, 1, 0, 2, 64),
    (True, 64, 2, 0, 3, 32),
    (True, 32, 3, 0, 4, 16),
    (True, 16, 4, 0, 5, 16),
    (False, 16, 0, 1, 5, 16),
    (False, 16, 0, 2, 5, 16),
    (False, 16, 0, 0, 5, 32),
    (False, 32, 0, 1, 5, 32),
    (False, 32, 0, 2, 5, 32),
    (False, 32, 0, 0, 5, 64),
]


def test_a_worked_example() -> None:
    """Steps 2 and 4 are two overflows, not in a row: the scale stays. Step 7 is at min_scale."""
    scaler = LossScaler(initial_scale=64, growth_interval=3, hysteresis=2, min_scale=16, max_scale=128)
    for step, (overflow, scale, *after) in enumerate(STEPS, start=1):
        assert scaler.scale == scale, f"step {step}"
        scaler.update(overflow)
        assert [scaler.overflows, scaler.clean_steps, scaler.skipped, scaler.scale] == after, f"step {step}"


def test_the_defaults_on_the_page_are_the_defaults() -> None:
    from megatron.core.optimizer import OptimizerConfig

    from megatron_fp8.train.config.sections import OptimizerSection

    def number(text: str) -> float:
        return eval(text.replace("^", "**"), {})

    ours, theirs, app = LossScaler(), OptimizerConfig(), OptimizerSection()
    table = PAGE.read_text(encoding="utf-8").partition("### Settings")[2].partition("\n\nAn **overflow**")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[4:]]
    assert len(rows) == 8
    for name, default, option, megatron, _ in rows:
        if name:
            assert getattr(ours, name) == number(default), name
        if option:
            expected = None if megatron == "none" else number(megatron)
            assert getattr(app, option) == expected, option
            if option != "max_loss_scale":
                assert getattr(theirs, option) == expected, option


class Plain:
    """The documented rule over the whole past: which scale comes next, from the list of verdicts."""

    def __init__(self, **knobs: Any) -> None:
        self.knobs, self.past, self.scale = LossScaler(**knobs), [], LossScaler(**knobs).scale
        self.since = 0  # the first step that counts for growth

    def update(self, overflow: bool) -> None:
        self.past.append(overflow)
        k = self.knobs
        if overflow:
            self.since = len(self.past)
            if all(self.past[-k.hysteresis :]) and len(self.past) >= k.hysteresis:
                self.scale = max(self.scale * k.backoff_factor, k.min_scale)
        elif len(self.past) - self.since == k.growth_interval:
            self.since = len(self.past)
            self.scale = min(self.scale * k.growth_factor, k.max_scale)


@pytest.mark.parametrize("hysteresis", [1, 2, 4])
def test_any_course_follows_the_rule(hysteresis: int) -> None:
    knobs = {"hysteresis": hysteresis, "growth_interval": 5, "min_scale": 2.0, "max_scale": 2.0**20}
    scaler, plain, dice = LossScaler(**knobs), Plain(**knobs), random.Random(hysteresis)
    met = set()
    for number in range(6000):
        overflow = dice.random() < (0.02, 0.5)[number // 300 % 2]
        scaler.update(overflow)
        plain.update(overflow)
        assert scaler.scale == plain.scale, f"step {number}"
        met.add(scaler.scale)
    assert scaler.skipped == sum(plain.past)
    assert min(met) == 2.0 and max(met) == 2.0**20, "the course must reach both bounds"


def test_a_training_that_stands_still_says_so() -> None:
    """At min_scale nothing is left to try: said every STUCK steps, and not of a scale that still comes down."""
    scaler = LossScaler(initial_scale=4.0, hysteresis=1, min_scale=2.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(STUCK - 1):
            scaler.update(True)
        scaler.update(False)
        high = LossScaler(initial_scale=2.0**100, max_scale=2.0**100)
        for _ in range(STUCK):
            high.update(True)
    assert not said and scaler.scale == 2.0
    with pytest.warns(UserWarning, match=f"{STUCK} steps in direct succession .* min_scale=2") as told:
        for _ in range(2 * STUCK - 1):
            scaler.update(True)
    assert len(told) == 1 and scaler.skipped == 3 * STUCK - 2


def test_a_saved_scaler_goes_on_as_if_nothing_had_been() -> None:
    dice, knobs = random.Random(3), {"growth_interval": 4, "hysteresis": 3, "growth_factor": 1.7}
    whole = LossScaler(**knobs)
    for _ in range(100):
        whole.update(dice.random() < 0.3)
    whole.update(True)
    again = LossScaler(**knobs)
    again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert again == whole and whole.overflows > 0 and whole.skipped > 20
    for _ in range(50):
        overflow = dice.random() < 0.3
        whole.update(overflow)
        again.update(overflow)
        assert again == whole


def test_other_knobs_bound_a_loaded_state() -> None:
    scaler = LossScaler(growth_interval=2, max_scale=2.0**17)
    scaler.load_state_dict({"scale": 2.0**30, "clean_steps": 700, "overflows": 0, "skipped": 9})
    assert (scaler.scale, scaler.skipped) == (2.0**17, 9)
    scaler = LossScaler(growth_interval=2, max_scale=2.0**17)
    scaler.load_state_dict({"scale": 2.0**10, "clean_steps": 700, "overflows": 0, "skipped": 9})
    scaler.update(False)
    assert scaler.scale == 2.0**11, "a count past a shorter interval still ends in a growth"


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"initial_scale": 0.5}, "initial_scale=0.5"),
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"max_scale": math.inf}, "max_scale=inf"),
        ({"initial_scale": math.nan}, "initial_scale=nan"),
        ({"max_scale": 2.0}, "max_scale=2.0"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"hysteresis": 1.5}, "hysteresis=1.5"),
        ({"hysteresis": True}, "hysteresis=True"),
    ],
)
def test_knobs_out_of_range_are_named(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        LossScaler(**knobs)


@pytest.mark.parametrize(
    "state",
    [
        {"scale": 4.0},
        {"scale": math.nan, "clean_steps": 0, "overflows": 0, "skipped": 0},
        {"scale": 0.0, "clean_steps": 0, "overflows": 0, "skipped": 0},
        {"scale": 4.0, "clean_steps": -1, "overflows": 0, "skipped": 0},
    ],
)
def test_an_impossible_state_changes_nothing(state: dict[str, Any]) -> None:
    scaler = LossScaler()
    with pytest.raises(ValueError, match="state"):
        scaler.load_state_dict(state)
    assert scaler == LossScaler()


def test_scaling_by_a_power_of_two_and_back_changes_no_bit() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weights = torch.linspace(-3, 5, 1000)
    (expected,) = torch.autograd.grad((x.sin() * weights).sum(), x)
    scaler = LossScaler(initial_scale=2.0**13)
    (found,) = torch.autograd.grad(scaler.scale_loss((x.sin() * weights).sum()), x)
    assert not torch.equal(found, expected)
    assert not unscale_([found], scaler.scale)
    assert torch.equal(found, expected)


def test_the_loss_is_scaled_in_float32() -> None:
    loss = LossScaler(initial_scale=2.0**20).scale_loss(torch.tensor(3.0, dtype=torch.float16))
    assert loss.dtype == torch.float32 and loss == 3 * 2.0**20


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unscaling_finds_what_is_not_finite_in_any_gradient(value: float, dtype: torch.dtype) -> None:
    grads = [torch.ones(7), torch.ones(2, 63, dtype=torch.bfloat16), torch.ones(129)]
    assert not unscale_(grads, 4.0)
    assert all(bool((grad == 0.25).all()) for grad in grads)
    sick = torch.ones(3, 5, dtype=dtype)
    sick[2, 4] = value
    assert unscale_([*grads, sick], 4.0)
    assert not unscale_([], 4.0)


def test_float16_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="autocast"):
        unscale_([torch.ones(3, dtype=torch.float16)], 2.0)


def test_one_process_agrees_with_itself() -> None:
    assert agree(True) and not agree(False)

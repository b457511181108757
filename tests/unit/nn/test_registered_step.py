"""Optimizers that end the iteration: what is missed is found out, wrapped and copied ones, closures, ruined weights."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from megatron_fp8.nn import convert_to_fp8, fp8_autocast, fp8_step, register_fp8_step
from tests.support.small_training import DELAYED, Tower, assert_same_state, batch, sgd, train


def test_an_optimizer_step_without_it_is_an_error():
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = sgd(model)
    model(batch(0)).sum().backward()
    optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"call\n? ?.*fp8_step\(model\) once an iteration|fp8_step was not called"
    ):
        model(batch(1))
    model.eval()(batch(1))  # evaluation is nobody's iteration
    model.train()
    fp8_step(model)
    model(batch(1))


def test_what_is_no_missing_call():
    model = convert_to_fp8(Tower())
    optimizer = sgd(model)
    optimizer.step()  # before anything ran
    with torch.no_grad(), fp8_autocast(enabled=False):
        model(batch(0))
    optimizer.step()  # nothing was cast
    model(batch(0)).sum().backward()
    fp8_step(model)
    optimizer.step()  # settled before
    model(batch(1))
    sgd(Tower()).step()  # somebody else's
    model(batch(1))
    frozen = convert_to_fp8(Tower().requires_grad_(False))
    adapter = nn.Linear(32, 32)
    frozen.adapter = adapter
    optimizer = sgd(adapter)
    frozen(adapter(batch(0))).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        frozen(batch(0))  # trains a part of this model, whose scales would stay


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS])
def test_registered_optimizers_run_closures_inside_of_their_step(kind):
    """And somebody runs the model in training between two steps: one more microbatch, or the loss after the step."""
    model, by_hand = convert_to_fp8(Tower(), DELAYED), convert_to_fp8(Tower(), DELAYED)

    def steps(model, optimizer, settle):
        def closure() -> torch.Tensor:
            loss = model(batch(0)).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            closure()
            optimizer.step(closure)
            settle()
            optimizer.zero_grad()

    optimizer = kind(model.parameters())
    register_fp8_step(optimizer, model)
    steps(model, optimizer, lambda: None)
    steps(by_hand, kind(by_hand.parameters()), lambda: fp8_step(by_hand))
    assert_same_state(model, by_hand)
    assert model.up.fp8_group.iteration == 3


def test_registered_twice_is_registered_once():
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = sgd(model)
    first, second = (register_fp8_step(optimizer, model) for _ in range(2))
    train(model, optimizer, range(2), hook=True)
    assert model.up.fp8_group.iteration == 2
    first.remove()
    train(model, optimizer, range(2), hook=True)
    second.remove()
    assert not optimizer._optimizer_step_post_hooks


def test_an_optimizer_that_calls_its_base_class_steps_once():
    """torch wraps both classes' step, if an optimizer of the base class was ever made, and each calls the hooks."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = convert_to_fp8(Tower(), DELAYED)
    sgd(Tower())
    optimizer = Own(model.parameters(), lr=0.1)
    register_fp8_step(optimizer, model)
    train(model, optimizer, range(2), hook=True)
    assert model.up.fp8_group.iteration == 2

    def failing() -> torch.Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        optimizer.step(failing)
    train(model, optimizer, range(1), hook=True)
    assert model.up.fp8_group.iteration == 3


def test_wrapped_optimizers_and_what_is_none():
    class Wrapper(torch.optim.Optimizer):  # accelerate's is one of these
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def step(self):
            self.optimizer.step()

    model = convert_to_fp8(Tower(), DELAYED)
    wrapper = Wrapper(Wrapper(sgd(model)))
    register_fp8_step(wrapper, model)
    for i in range(2):
        model(batch(i)).sum().backward()
        wrapper.step()
    assert model.up.fp8_group.iteration == 2
    with pytest.raises(ValueError, match=r"register_fp8_step\(object\): it is no torch.optim.Optimizer"):
        register_fp8_step(object(), model)


def test_a_copied_pair_is_registered_again():
    """Copies of optimizers have no hooks; the message says so, and then both train alike."""
    model = convert_to_fp8(Tower(), DELAYED)
    optimizer = sgd(model)
    register_fp8_step(optimizer, model)
    twin, its = copy.deepcopy((model, optimizer))
    with pytest.raises(RuntimeError, match="and again for copies: those of optimizers have no hooks"):
        train(twin, its, range(2), hook=True)
    twin, its = copy.deepcopy((model, optimizer))
    register_fp8_step(its, twin)
    assert train(model, optimizer, range(3), hook=True) == train(twin, its, range(3), hook=True)
    assert_same_state(model, twin)


def test_a_step_that_ruins_the_weights_is_said_once():
    """An optimizer asks nobody whether the gradients are finite."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    convert_to_fp8(model, skip=())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    register_fp8_step(optimizer, model)

    def iteration(value: float) -> list[str]:
        x = torch.ones(16, 32)
        x[3, 5] = value
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(x).sum().backward()
            optimizer.step()
        return [str(each.message) for each in said if "no longer finite" in str(each.message)]

    assert iteration(1.0) == []
    (line,) = iteration(math.nan)
    assert "0.weight" in line and "LossScaler" in line
    assert iteration(math.nan) == []

"""Which steps of optimizers end an iteration (state/iteration.py)."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from megatron_fp8.nn import (
    Fp8Linear,
    convert_to_fp8,
    fp8_autocast,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
    register_fp8_step,
)
from megatron_fp8.recipe import DelayedScaling
from tests.support.small_training import DELAYED, Tower, assert_same_state, batch, sgd, tower, train

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def trained(recipe: object = DELAYED, steps: int = 3) -> tuple[Tower, torch.optim.Optimizer]:
    model = tower(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    register_fp8_step(optimizer, model)
    train(model, optimizer, range(steps), hook=True)
    return model, optimizer


@pytest.mark.parametrize("fp8_first", [True, False])
@pytest.mark.parametrize("recipe", [DELAYED, DelayedScaling(stochastic_rounding=True, interval=2)], ids=str)
def test_distributed_checkpoint_loads_in_any_order(recipe: DelayedScaling, fp8_first: bool) -> None:
    """set_state_dict steps a new optimizer to make its state: that ends no iteration."""
    twin, twins = trained(recipe)
    weights, moments = copy.deepcopy(get_state_dict(twin, twins))
    fp8 = fp8_state_dict(twin)
    train(twin, twins, range(3, 6), hook=True)

    model = tower(recipe, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    register_fp8_step(optimizer, model)
    if fp8_first:
        load_fp8_state_dict(model, fp8)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if not fp8_first:
        load_fp8_state_dict(model, fp8)
    train(model, optimizer, range(3, 6), hook=True)
    assert_same_state(model, twin)


def test_saving_changes_no_bit() -> None:
    """get_state_dict steps an optimizer without state, as plain SGD, once more at each save."""
    models = [tower(DELAYED) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        register_fp8_step(optimizer, model)
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, range(step, step + 1), hook=True)
        get_optimizer_state_dict(models[0], optimizers[0])
        assert_same_state(*models)


def test_saving_after_a_batch_that_was_dropped_changes_no_bit() -> None:
    """Its amaxes belong to the iteration that goes on."""
    models = [tower(DELAYED) for _ in range(2)]
    optimizers = [sgd(model) for model in models]
    for saves, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        register_fp8_step(optimizer, model)
        (model(batch(7)) * 100).sum().backward()
        optimizer.zero_grad()
        if saves:
            get_optimizer_state_dict(model, optimizer)
        train(model, optimizer, range(2), hook=True)
    assert_same_state(*models)


def test_a_learning_rate_of_zero_trains_where_there_are_gradients() -> None:
    model = tower(DELAYED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    register_fp8_step(optimizer, model)
    train(model, optimizer, range(2), hook=True)
    assert int(fp8_state_dict(model)["up.iteration"]) == 2


def test_a_second_step_ends_no_second_iteration() -> None:
    """With gradients that are still there, by the same optimizer or another of the model's."""
    model = tower(DELAYED)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.up, model.down)]
    for optimizer in optimizers:
        register_fp8_step(optimizer, model)
    model(batch(0)).sum().backward()
    for optimizer in (*optimizers, *optimizers):
        optimizer.step()
    assert int(fp8_state_dict(model)["up.iteration"]) == 1
    fp8_step(model)  # an explicit one always does
    assert int(fp8_state_dict(model)["up.iteration"]) == 2


def test_fp8_step_and_the_hook_end_one_iteration() -> None:
    model, twin = tower(DELAYED), tower(DELAYED)
    optimizer = sgd(model)
    register_fp8_step(optimizer, model)
    assert train(model, optimizer, range(3)) == train(twin, sgd(twin), range(3))
    assert_same_state(model, twin)


@pytest.mark.parametrize(("frozen", "compiled"), [(True, True), (False, False)])
def test_iterations_in_high_precision_end_too(frozen: bool, compiled: bool) -> None:
    """Compiled code counts nothing there, and no backward comes through a frozen layer."""
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), skip=["1"])
    model[0].requires_grad_(not frozen)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    register_fp8_step(optimizer, model)
    for _ in range(2):
        with fp8_autocast(enabled=False):
            call(batch(0).detach()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert int(fp8_state_dict(model)["0.iteration"]) == 2


def test_a_dry_forward_before_a_load_is_no_iteration() -> None:
    """Nor does the step that makes the optimizer's state ask for fp8_step."""
    twin, twins = trained()
    weights, moments = get_state_dict(twin, twins)
    model = tower(DELAYED, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    register_fp8_step(optimizer, model)
    model(batch(0))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    load_fp8_state_dict(model, fp8_state_dict(twin))
    model(batch(0)).sum().backward()
    optimizer.step()
    assert int(fp8_state_dict(model)["up.iteration"]) == 4


def test_an_optimizer_that_steps_inside_a_backward_is_told_to_end_iterations_itself() -> None:
    model = tower(DELAYED)
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        register_fp8_step(optimizer, model)
        parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    with pytest.raises(RuntimeError, match="steps inside a backward, where the iteration is not over yet"):
        model(batch(0)).sum().backward()


def test_a_copy_made_before_the_step_is_in_the_same_iteration() -> None:
    """Registered for both: each ends its iteration, with the amaxes that were recorded before the copy was made."""
    model = tower(DELAYED)
    optimizer = sgd(model)
    register_fp8_step(optimizer, model)
    train(model, optimizer, range(2), hook=True)
    model(batch(2)).sum().backward()
    copied = copy.deepcopy(model)
    for mine, other in zip(copied.parameters(), model.parameters(), strict=True):
        mine.grad = other.grad.clone()
    theirs = sgd(copied)
    register_fp8_step(theirs, copied)
    optimizer.step()
    theirs.step()
    assert_same_state(copied, model)
    copied(batch(3)).sum().backward()
    twin = copy.deepcopy(copied)
    sgd(twin).step()  # nobody ends its iteration
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        twin(batch(4))


def test_a_forward_without_gradients_between_two_steps_asks_for_no_end() -> None:
    model = tower(DELAYED)
    first, second = (torch.optim.SGD(linear.parameters(), lr=0.01) for linear in (model.up, model.down))
    model(batch(0)).sum().backward()
    fp8_step(model)
    first.step()
    with torch.no_grad():
        model(batch(1))
    second.step()
    model(batch(2)).sum().backward()
    first.step()
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        model(batch(3))


def test_what_an_unfinished_iteration_met_is_not_the_resumed_ones() -> None:
    model = tower(DELAYED)
    train(model, sgd(model), range(2))
    saved = fp8_state_dict(model)
    x = batch(2).detach()
    x[0, 0] = torch.inf
    model(x).sum().backward()
    load_fp8_state_dict(model, saved)
    model(batch(3)).sum().backward()
    counts = fp8_step(model)
    assert counts.nonfinite == 0 and counts.fp8_gemms == 3 * 2


@pytest.mark.parametrize("training", [True, False])
def test_saving_does_not_unite_linears_in_the_middle_of_their_first_iteration(training: bool) -> None:
    model = nn.Sequential(Fp8Linear(32, 32), nn.GELU(), Fp8Linear(32, 32))
    fp8_state_dict(model)
    model = nn.Sequential(Fp8Linear(32, 32), nn.GELU(), Fp8Linear(32, 32)).train(training)
    loss = model(batch(0)).sum()
    with pytest.raises(RuntimeError, match="save and load FP8 state before it, or call fp8_step"):
        fp8_state_dict(model)
    loss.backward()
    assert fp8_step(model).fp8_gemms == 6 and fp8_state_dict(model)


def test_an_evaluation_in_another_thread_changes_no_count() -> None:
    """It runs through the same linears while the training counts, and ends, its iterations."""
    model = tower(DELAYED)
    teacher = model.down
    stop, interval = threading.Event(), sys.getswitchinterval()

    def evaluate() -> None:
        teacher.eval()
        with torch.no_grad():
            while not stop.is_set():
                teacher(torch.ones(4, teacher.in_features))

    thread = threading.Thread(target=evaluate)
    x = batch(0).detach()
    x[0, 0] = torch.inf
    wanted = (1, 2)  # an Inf in the input; fprop and wgrad
    try:
        sys.setswitchinterval(1e-5)
        model.up(x).sum().backward()
        fp8_step(model)
        thread.start()
        for _ in range(200):
            model.up(x).sum().backward()
            counts = fp8_step(model)
            assert (counts.nonfinite, counts.fp8_gemms) == wanted
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()

"""Replaced weights under delayed scaling: evaluation saturates none, and of what training wrote it keeps the bits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.inference import prepare_for_inference
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
from tests.support.small_training import Tower, batch, sgd, train

RECIPE = DelayedScaling(amax_history_len=3)


def trained(steps: int = 3) -> Tower:
    model = convert_to_fp8(Tower(), RECIPE)
    train(model, sgd(model), range(steps))
    return model


def error(model: nn.Module) -> float:
    """How far FP8's evaluation is from high precision's, with the weights as they are."""
    x = batch(5)
    with torch.no_grad():
        y = model.eval()(x)
        with fp8_autocast(enabled=False):
            exact = model(x)
    return float((y - exact).norm() / exact.norm())


def scales_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in fp8_state_dict(model).items() if name.endswith(("scale", "warm"))}


def load(model: nn.Module, factor: float) -> None:
    model.load_state_dict({name: factor * value for name, value in model.state_dict().items()})


def in_place(model: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for linear in (model.up, model.down):
            linear.weight.mul_(factor)


WAYS: dict[str, Callable[[nn.Module, float], None]] = {
    "load_state_dict": load,
    "in place": in_place,
}


@pytest.mark.filterwarnings("ignore:.* was replaced since")
@pytest.mark.parametrize(
    ("way", "factor", "prepared"),
    [
        *((way, 8.0, False) for way in WAYS),
        ("in place", 2.0**-14, False),
        ("in place", 8.0, True),
        ("load_state_dict", 2.0**-14, True),
    ],
)
def test_a_replaced_weight_is_scaled_by_itself(way, factor, prepared):
    """Saturated by 8 it would be off by half and more; of weights 2^-14 as large most became zeros."""
    model = trained()
    # Inputs of `down` are what `up` makes: only a load starts their scales again, so that the rest keeps them in range.
    if way != "load_state_dict":
        with torch.no_grad():
            model.up.bias.zero_()
        model.down.fp8_site.casts["input"].rowwise.slot.warm = False
    WAYS[way](model, factor)
    if prepared:
        with torch.no_grad(), fp8_autocast(enabled=False):
            exact = model.eval()(batch(5))
        prepare_for_inference(model)
        y = model(batch(5)).detach()
        off = float((y - exact).norm() / exact.norm())
        assert model.fp8_inference.replaced == ([] if way == "load_state_dict" else ["up", "down"])
    else:
        off = error(model)
    assert off < 0.08


def test_it_is_said_once_and_only_of_weights_that_do_not_fit():
    model = trained()
    in_place(model, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        error(model)
    in_place(model, 4)
    with pytest.warns(UserWarning, match=r"up\.weight was replaced since training gave it a scale") as said:
        error(model)
        error(model)
    assert len(said) == 1


@pytest.mark.parametrize("order", ["before", "after"], ids=["fp8_step before the step", "after it"])
def test_evaluation_between_steps_has_the_training_forwards_bits(order):
    """Weights outgrow the last iteration's scale in each step."""
    model = convert_to_fp8(Tower(), RECIPE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    grown = 0
    for step in range(6):
        model.train()(batch(step)).square().mean().backward()
        if order == "before":
            fp8_step(model)
        optimizer.step()
        if order == "after":
            fp8_step(model)
        optimizer.zero_grad()
        slot = model.up.fp8_site.casts["weight"].rowwise.slot
        grown += bool(model.up.weight.abs().max() * slot.scale > 448)
        copied = copy.deepcopy(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            evaluated = model.eval()(batch(9)).detach()
            averaged = copied.eval()(batch(9)).detach()
            frozen = prepare_for_inference(copy.deepcopy(model))(batch(9)).detach()
        forward = copied.train()(batch(9)).detach()
        for mine in (evaluated, averaged, frozen):
            assert_same_bytes(mine, forward)
    assert grown > 2, "no weight outgrew its scale: nothing was tested"


def test_loading_starts_training_again_as_a_fresh_model_does():
    model, fresh = trained(), convert_to_fp8(Tower(seed=3), RECIPE)
    weights = copy.deepcopy(fresh.state_dict())
    model.load_state_dict(weights)
    for name, warm in fp8_state_dict(model).items():
        if name.endswith("warm"):
            assert not warm, name
    assert train(model, sgd(model), range(3)) == train(fresh, sgd(fresh), range(3))


def test_a_saved_state_counts_for_weights_that_are_loaded_in_its_iteration():
    """An iteration later they are no longer those of weights that are still to come."""
    model = trained()
    weights, saved = copy.deepcopy((model.state_dict(), fp8_state_dict(model)))
    load_fp8_state_dict(model, saved)
    train(model.train(), sgd(model), range(1))
    model.load_state_dict(weights)
    assert not any(warm for name, warm in scales_of(model).items() if name.endswith("warm"))


def test_loading_other_parameters_leaves_scales_alone():
    model = trained()
    before = scales_of(model)
    model.load_state_dict({"down.bias": torch.zeros(32)}, strict=False)
    after = scales_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.load_state_dict({"down.weight": model.down.weight}, strict=False)
    cold = {
        name.rpartition(".")[0]
        for name, warm in scales_of(model).items()
        if name.endswith("warm") and not warm
    }
    assert cold == {"down.input", "down.weight", "down.grad_output"}


def test_an_adapter_merged_into_a_frozen_weight():
    """As PEFT does it: through .data, into weights that no optimizer steps. 1.3 times is less than a step may do."""
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32)), RECIPE)
    model[0].requires_grad_(False)
    register_fp8_step(optimizer := torch.optim.SGD(model[1].parameters(), lr=0.01), model)
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model[0].weight.data *= 1.3
    for mine in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), model):
        with pytest.warns(UserWarning, match=r"0\.weight was replaced"):
            assert error(mine[0]) < 0.04


def test_training_heals_in_the_next_iteration():
    """Its first forward saturates, as docs/pytorch.md has it: the scale is the last iteration's."""
    model = trained()
    in_place(model, 8)
    slot = model.up.fp8_site.casts["weight"].rowwise.slot
    off = []
    for _ in range(2):
        off.append(float(model.up.weight.detach().abs().max() * slot.scale / 448))
        model.train()(batch(0)).sum().backward()
        fp8_step(model)
    assert off[0] > 4 and off[1] == pytest.approx(1, abs=1e-4)


@pytest.mark.filterwarnings("ignore:.* was replaced since")
def test_compiled_evaluation_and_its_backward():
    model = trained()
    in_place(model, 8)
    model.eval()

    def run(forward: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = batch(9).detach().requires_grad_()
        y = forward(x)
        model(batch(3))  # after it no codes are kept: compiled code's backward makes them again
        y.square().sum().backward()
        return [y.detach(), x.grad]

    assert_all_same_bytes(run(torch.compile(model, backend="aot_eager", fullgraph=True)), run(model))
    model.up.fp8_site.casts["grad_output"].rowwise.slot.warm = False  # this gradient is no training's
    with fp8_autocast(enabled=False):
        exact = run(model.up)[1]
    off = (run(model.up)[1] - exact).norm() / exact.norm()
    assert off < 0.06, "dgrad had other codes of the weight"


def test_weights_without_numbers_or_with_inf_keep_the_scale():
    for value in (0.0, torch.inf):
        model = trained()
        kept = model.up.fp8_site.casts["weight"].rowwise.slot.scale
        with torch.no_grad():
            model.up.weight.fill_(value)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.eval().up(batch(9))
        assert_same_bytes(model.up.fp8_site.weights.evaluation_casts.rowwise.delayed_scale(), kept)


@pytest.mark.parametrize("factor, replaced", [(8.0, ["linear"]), (1.9, [])])
def test_prepared_linears_that_evaluation_does_not_look_at(factor, replaced):
    """Megatron-Core's: nobody knows who wrote their weights, and an optimizer may have made them a little larger."""
    torch.manual_seed(0)
    linear = Fp8Linear(64, 64, recipe=RECIPE)
    train_alone(linear)
    linear.fp8_site.weights.evaluation_casts = linear.fp8_site.weights.casts
    linear.weight.data *= factor
    before = linear.eval()(torch.eye(64)).detach()
    assert prepare_for_inference(linear).fp8_inference.replaced == replaced
    assert torch.equal(linear(torch.eye(64)), before) == (not replaced)


def train_alone(linear: nn.Module) -> None:
    for step in range(2):
        linear(torch.eye(64) + step).square().mean().backward()
        fp8_step(linear)

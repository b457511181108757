"""Weights a little beyond their delayed scale: up to twice is the training's own writes' alone, whoever knows of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.nn import (
    Fp8Linear,
    convert_to_fp8,
    fp8_autocast,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
)
from megatron_fp8.recipe import DelayedScaling
from tests.support.small_training import Tower, batch, sgd, train

RECIPE = DelayedScaling(amax_history_len=3)
FACTOR = 1.8
"""Saturated by it a linear is off by 0.3, and scaled by itself by 0.04."""


def made() -> nn.Module:
    torch.manual_seed(0)
    return convert_to_fp8(nn.Sequential(nn.Linear(32, 32)), RECIPE, skip=[])


def trained() -> nn.Module:
    model = made()
    train(model, torch.optim.SGD(model.parameters(), lr=1e-6), range(2))
    return model


def resumed(of: nn.Module, *, fp8_first: bool = False) -> nn.Module:
    """As in another process."""
    model = made()
    if fp8_first:
        load_fp8_state_dict(model, fp8_state_dict(of))
    model.load_state_dict(of.state_dict())
    if not fp8_first:
        load_fp8_state_dict(model, fp8_state_dict(of))
    return model


def others(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: FACTOR * value for name, value in model.state_dict().items()}


def write(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[0].weight.mul_(FACTOR)
    return model


def write_data(model: nn.Module) -> nn.Module:
    model[0].weight.data.mul_(FACTOR)
    return model


def replace_memory(model: nn.Module) -> nn.Module:
    model[0].weight.data = FACTOR * model[0].weight.detach()
    return model


def assign(model: nn.Module) -> nn.Module:
    model[0].weight = nn.Parameter(FACTOR * model[0].weight.detach())
    return model


def load(model: nn.Module) -> nn.Module:
    model.load_state_dict(others(model))
    return model


def swap(model: nn.Module) -> nn.Module:
    weight = model[0].weight
    torch.utils.swap_tensors(weight, nn.Parameter(FACTOR * weight.detach(), requires_grad=False))
    return model


class Called(nn.Module):
    """With other weights, by torch.func."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.others = model, others(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.model, self.others, (x,))


WAYS: dict[str, Callable[[], nn.Module]] = {
    "other memory": lambda: replace_memory(trained()),
    "assigned": lambda: assign(trained()),
    "assigned in a copy": lambda: assign(copy.deepcopy(trained())),
    "assigned, then copied": lambda: copy.deepcopy(assign(trained())),
    "written, then copied twice": lambda: copy.deepcopy(copy.deepcopy(write(trained()))),
    "called with others in a copy": lambda: Called(copy.deepcopy(trained())),
    "resumed, then written": lambda: write(resumed(trained())),
    "resumed, then through data": lambda: write_data(resumed(trained())),
    "resumed in the other order": lambda: write_data(resumed(trained(), fp8_first=True)),
    "resumed, then loaded": lambda: load(resumed(trained())),
    "resumed, then called with others": lambda: Called(resumed(trained())),
    "resumed, then copied and written": lambda: write_data(copy.deepcopy(resumed(trained()))),
    "resumed twice": lambda: write_data(resumed(resumed(trained()))),
    "prepared, then written": lambda: write(prepare_for_inference(trained())),
    "a prepared copy": lambda: write(prepare_for_inference(copy.deepcopy(trained()))),
    "prepared, then swapped": lambda: swap(prepare_for_inference(copy.deepcopy(trained()))),
    "a copy of a prepared one": lambda: write_data(copy.deepcopy(prepare_for_inference(trained()))),
}


def off(model: nn.Module, exact: torch.Tensor) -> float:
    with torch.no_grad():
        y = model.eval()(batch(5))
    return float((y - exact).norm() / exact.norm())


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_training_did_not_write_is_never_saturated(way):
    plain = trained()
    exact = nn.functional.linear(batch(5), FACTOR * plain[0].weight, plain[0].bias).detach()
    with pytest.warns(UserWarning, match=r"0\.weight was replaced"):  # a prepared one when it is written
        changed = WAYS[way]()
        with torch.no_grad():
            if isinstance(changed, Called):
                changed.others["0.bias"] = plain[0].bias.detach()
            else:
                changed[0].bias.copy_(plain[0].bias)
        assert off(changed, exact) < 0.05


def grown(steps: int = 5) -> Tower:
    """Weights that outgrew their scale in the last step, one of them frozen before."""
    model = convert_to_fp8(Tower(), RECIPE)
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), range(steps))
    slot = model.up.fp8_site.casts["weight"].rowwise.slot
    assert model.up.weight.abs().max() * slot.scale > 448, "it did not outgrow its scale: nothing is tested"
    return model


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("fp8_first", [False, True])
def test_a_resumed_evaluation_has_the_uninterrupted_ones_bits(fp8_first, frozen):
    """Also of a model that is built for inference alone, whose weights are frozen."""
    model = grown()
    y = model.eval()(batch(9)).detach()
    weights, saved = copy.deepcopy((model.state_dict(), fp8_state_dict(model)))
    other = convert_to_fp8(Tower(seed=7), RECIPE).requires_grad_(not frozen).eval()
    if fp8_first:
        load_fp8_state_dict(other, saved)
    other.load_state_dict(weights)
    if not fp8_first:
        load_fp8_state_dict(other, saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mine in (other, copy.deepcopy(other), prepare_for_inference(copy.deepcopy(other))):
            assert_same_bytes(mine(batch(9)).detach(), y)
    again = convert_to_fp8(Tower(seed=8), RECIPE)
    again.load_state_dict(weights)
    load_fp8_state_dict(again, fp8_state_dict(other))
    assert_same_bytes(again.eval()(batch(9)).detach(), y, "resumed from what was resumed")


def test_weights_that_are_resumed_in_another_dtype_are_the_trainings():
    """BF16 may round a weight up, beyond what was saved."""
    model = grown()
    bound = 0.0
    other = convert_to_fp8(Tower(seed=7), RECIPE)
    load_fp8_state_dict(other, fp8_state_dict(model))
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs * (1 + 2.0**-9))
            bound = max(bound, float(mine.abs().max() / theirs.abs().max()))
    assert bound > 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.eval()(batch(9))


def test_a_state_that_does_not_say_how_large_weights_were():
    """As versions before wrote it, and ranks that have shards: up to twice."""
    model = trained()
    saved = {name: value for name, value in fp8_state_dict(model).items() if not name.endswith("weight.amax")}
    other = made()
    other.load_state_dict(model.state_dict())
    load_fp8_state_dict(other, saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(other).eval()(batch(9))
    write(other)
    with pytest.warns(UserWarning, match="replaced"):
        other(batch(9))


def test_what_is_saved_of_a_weight():
    model = grown()
    saved = fp8_state_dict(model)
    assert_same_bytes(saved["up.weight.amax"], model.up.weight.detach().abs().max().view(1))
    model.up.weight.requires_grad_(False)
    train(model, sgd(model), range(1))
    write_data(nn.Sequential(model.up))
    assert fp8_state_dict(model)["up.weight.amax"].tolist() == [0]  # a merged adapter is not the training's
    assert fp8_state_dict(model)["down.weight.amax"] > 0


def test_an_iteration_ends_what_was_resumed():
    """Weights grow in it, and what they were before is of no matter then."""
    model = grown(5)
    other = convert_to_fp8(Tower(seed=7), RECIPE)
    other.load_state_dict(model.state_dict())
    load_fp8_state_dict(other, fp8_state_dict(model))
    for one in (model, other):
        train(one.train(), torch.optim.Adam(one.parameters(), lr=0.01), range(5, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bytes(other.eval()(batch(9)).detach(), model.eval()(batch(9)).detach())


class Scaled(nn.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


@pytest.mark.parametrize("way", ["written", "copied and written", "loaded"])
def test_a_weight_that_is_computed(way):
    """Of it count the parameters from which it is computed."""
    torch.manual_seed(0)
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32, bias=False)), RECIPE, skip=[])
    parametrize.register_parametrization(model[0], "weight", Scaled(1.0))
    train(model, torch.optim.SGD(model.parameters(), lr=1e-6), range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(batch(5))
    exact = nn.functional.linear(batch(5), FACTOR * model[0].weight).detach()
    if way == "copied and written":
        model = copy.deepcopy(model)
    if way == "loaded":
        key = "0.parametrizations.weight.0.factor"
        model.load_state_dict(model.state_dict() | {key: torch.tensor(FACTOR)})
        assert not any(warm for name, warm in fp8_state_dict(model).items() if name.endswith("warm"))
    else:
        with torch.no_grad():
            model[0].parametrizations.weight[0].factor.mul_(FACTOR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was replaced since")
        assert off(model, exact) < 0.05


def test_torch_may_swap_what_a_load_replaces():
    """It refuses where anybody holds a weak reference."""
    model = trained()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(others(model))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert not fp8_state_dict(model)["0.weight.warm"]


# ------------------------------------------------------------------------------- weights that live as codes, elsewhere


def prepared() -> Tower:
    model = convert_to_fp8(Tower(), RECIPE)
    train(model, sgd(model), range(3))
    return prepare_for_inference(model)


@pytest.mark.parametrize("factor", [1.6, 20.0])
@pytest.mark.parametrize("alive", [False, True], ids=["alone", "beside its original"])
def test_a_prepared_models_copy_loads_by_its_own_scales(alive, factor):
    model = prepared()
    before = model(batch(9)).detach()
    weights = {name: factor * value for name, value in model.state_dict().items()}
    counted: Any = model.up.fp8_site.state.counts.casts
    copied = copy.deepcopy(copy.deepcopy(model))
    copied.load_state_dict(weights)
    assert model.up.fp8_site.state.counts.casts == counted, "the original counts the copy's casts"
    with fp8_autocast(enabled=False), torch.no_grad():
        plain = Tower()
        plain.load_state_dict(weights)
        exact = plain(batch(9))
    if alive:
        assert_same_bytes(model(batch(9)).detach(), before, "the original")
        assert fp8_state_dict(model)["up.weight.warm"]
    else:
        del model
        copied.load_state_dict(weights)
    y = copied(batch(9)).detach()
    assert (y - exact).norm() / exact.norm() < 0.07
    fresh = prepared()
    fresh.load_state_dict(weights)
    assert_same_bytes(y, fresh(batch(9)).detach(), "a model that was not copied")


def test_a_copy_of_a_prepared_linear_that_joins_a_model_is_cast_there():
    copied = copy.deepcopy(prepare_for_inference(Fp8Linear(32, 32, recipe=RECIPE)))
    model = nn.Sequential(copied)
    assert fp8_state_dict(model).keys() >= {"0.weight.scale"}
    assert copied.weight.quantizer.slot.arena is copied.fp8_site.casts["weight"].rowwise.slot.arena
    assert copied.weight.quantizer.slot.name == "0.weight"


def test_histories_of_a_recipe_of_fp8_autocasts_that_wait():
    """What was saved of weights ends with the next iteration, whatever its recipe."""
    model = convert_to_fp8(Tower())
    with fp8_autocast(recipe=RECIPE):
        train(model, sgd(model), range(3))
    other = convert_to_fp8(Tower(seed=7))
    other.load_state_dict(model.state_dict())
    load_fp8_state_dict(other, fp8_state_dict(model))
    assert other.up.fp8_group.trained_weights.resumed
    train(other, sgd(other), range(1))
    assert not other.up.fp8_group.trained_weights.resumed
    with fp8_autocast(recipe=RECIPE), warnings.catch_warnings():
        warnings.simplefilter("error")
        other.eval()(batch(9))
    plain = convert_to_fp8(Tower())
    load_fp8_state_dict(plain, fp8_state_dict(convert_to_fp8(Tower())))
    assert not plain.up.fp8_group.trained_weights.resumed, "without delayed scaling nothing is kept"


def test_of_linears_whose_weight_is_one_the_first_casts_in_a_copy_too():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    convert_to_fp8(model, RECIPE, skip=[])
    train(model, sgd(model), range(2))
    copied = copy.deepcopy(prepare_for_inference(model))
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight.quantizer.slot.name == "0.weight"


def test_a_prepared_weight_that_is_moved_is_cast_where_it_is(monkeypatch):
    """A device that is another one by name: CPUs have no second."""
    model = prepare_for_inference(trained())
    where = [torch.device("cpu")]
    linear = model[0]
    monkeypatch.setattr(type(linear), "fp8_device", property(lambda self: where[0]))
    torch.__future__.set_overwrite_module_params_on_conversion(True)

    def move(tensor: Any) -> Any:
        where[0] = torch.device("cpu", 0)
        return tensor.move("cpu") if hasattr(tensor, "move") else tensor.clone()

    try:
        model._apply(move)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    slot = linear.weight.quantizer.slot
    assert slot.arena.device == where[0] and slot.arena is linear.fp8_site.casts["weight"].rowwise.slot.arena
    assert slot.warm, "its history did not come along"
    linear._load_from_state_dict({"weight": linear.weight}, "", {}, True, [], [], [])
    assert not slot.warm


def test_a_copied_iteration_goes_on():
    """fp8_step of a copy notes what the copy's training wrote."""
    copied = copy.deepcopy(trained())
    fp8_step(copied)
    with pytest.warns(UserWarning, match="replaced"):
        write(copied).eval()(batch(5))

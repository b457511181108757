"""Weights that a call computes: only a forward does so, whatever else asks where a linear is or saves what it knows."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.nn import (
    convert_to_fp8,
    enable_fp8_all_gather,
    fp8_autocast,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
)
from megatron_fp8.telemetry import Telemetry
from tests.support.experts import hidden, layer, routing
from tests.support.small_training import Tower, batch, sgd, train

RECIPES = ["delayed", "tensorwise"]


class Counted(nn.Module):
    """Draws from the generator, and counts how often."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return weight + torch.rand((), dtype=weight.dtype, device=weight.device) * 1e-3


def computed(model: nn.Module, name: str = "weight") -> Counted:
    """Parametrise a layer; what counts, from 0 on."""
    counted = Counted()
    parametrize.register_parametrization(model, name, counted)
    counted.count = 0
    return counted


def spectral_hook(model: Tower) -> None:
    nn.utils.spectral_norm(model.up)


def spectral(model: Tower) -> None:
    parametrizations.spectral_norm(model.up)


def weight_norms(model: Tower) -> None:
    nn.utils.weight_norm(model.up)
    parametrizations.weight_norm(model.down)


def pruned(model: Tower) -> None:
    prune.random_unstructured(model.up, "weight", 0.3)


def random(model: Tower) -> None:
    computed(model.up)


def random_bias_too(model: Tower) -> None:
    computed(model.up)
    computed(model.up, "bias")


class Property(nn.Module):
    """A weight that its user's class computes, of parameters named at will."""

    low: nn.Parameter
    asked: int

    @property
    def weight(self) -> torch.Tensor:
        self.asked += 1
        return self.low @ self.low.t() @ self.base + torch.rand(()) * 1e-3


def by_property(model: Tower) -> None:
    linear: Any = model.up
    linear.base = nn.Parameter(linear._parameters.pop("weight").detach())
    linear.low, linear.asked = nn.Parameter(torch.eye(64)), 0
    linear.__class__ = type("Low", (Property, type(linear)), {})


WAYS: dict[str, Callable[[Tower], None]] = {
    way.__name__: way
    for way in (spectral, spectral_hook, weight_norms, pruned, random, random_bias_too, by_property)
}


def made(way: str, recipe: Any) -> Tower:
    model = convert_to_fp8(Tower(), recipe)
    torch.manual_seed(1)
    WAYS[way](model)
    return model


def look_around(model: nn.Module) -> None:
    """All that is no forward."""
    saved = fp8_state_dict(model)
    model.load_state_dict(model.state_dict())
    load_fp8_state_dict(model, saved)
    model.to("cpu")
    model.eval().train()
    assert model.fp8_report
    Telemetry(model).close()


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_a_model_that_nothing_else_was_asked_of(way: str) -> None:
    losses = []
    for looks in (False, True):
        model = made(way, "delayed")
        optimizer = sgd(model)
        losses.append([])
        for step in range(4):
            losses[-1] += train(model, optimizer, range(step, step + 1))
            if looks:
                look_around(model)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forward_computes_its_weight_once_and_nothing_else_does(recipe: str) -> None:
    model = convert_to_fp8(Tower(), recipe)
    counted = computed(model.up)
    assert repr(model) and counted.count == 0
    bias = computed(model.up, "bias")

    def count(wanted: int, what: str) -> None:
        assert (counted.count, bias.count) == (wanted, wanted), what
        counted.count = bias.count = 0

    for _ in range(2):
        y = model(batch(0))
        count(1, "a forward")
        y.sum().backward()
        fp8_step(model)
        count(0, "an iteration's end")
    look_around(model)
    count(0, "states, moves and reports")
    model.double().float().bfloat16().float()
    count(0, "conversions")
    copied = copy.deepcopy(model)
    assert copied.up.parametrizations.weight[0].count == 0
    count(0, "a copy")
    convert_to_fp8(model)
    count(0, "a second conversion")
    with fp8_autocast(enabled=False):
        model(batch(0))
    count(1, "in high precision")
    with fp8_autocast(recipe="rowwise"):
        model(batch(0))
    count(1, "by another recipe")
    with torch.no_grad():
        model.eval()(batch(0))
    count(1, "in evaluation")
    model.to("meta")
    assert model.up.fp8_device.type == "meta"
    count(0, "a move")


def test_a_conv1d_in_high_precision_multiplies_by_the_weight_that_it_was_given() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    plain = Conv1D(64, 32)
    model = convert_to_fp8(nn.Sequential(copy.deepcopy(plain)), skip=[])
    counted = computed(model[0])
    with fp8_autocast(enabled=False):
        torch.manual_seed(2)
        y = model(batch(0))
    assert counted.count == 1
    torch.manual_seed(2)
    parametrize.register_parametrization(plain, "weight", Counted())
    torch.manual_seed(2)
    assert_same_bytes(y.detach(), plain(batch(0)).detach())


def test_inference_leaves_weights_that_are_computed_as_they_are() -> None:
    model = convert_to_fp8(Tower())
    counted = computed(model.up)
    calibration = calibrate(model, [batch(0).detach()])
    assert counted.count == 2, "the batch, and what the weight is"
    counted.count = 0
    prepare_for_inference(model, calibration=calibration)
    assert counted.count == 0
    assert model.fp8_inference.high_precision == ["up"] and "weight" not in model.up._parameters
    with torch.no_grad():
        model(batch(0))
    assert counted.count == 1


def test_calibration_computes_no_weight_in_training() -> None:
    model, twin = (made("spectral", "tensorwise") for _ in range(2))
    calibrate(model, [batch(0).detach()])
    assert_all_same_bytes(model.buffers(), twin.buffers())


def test_an_embedding_that_is_computed_is_not_asked_by_a_conversion() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 32), "up": nn.Linear(32, 32)})
    counted = computed(model["embedding"])
    assert convert_to_fp8(model).fp8_report.converted == ["up"]
    assert counted.count == 0


def test_a_weight_that_is_computed_travels_as_what_it_is_computed_from() -> None:
    model = convert_to_fp8(Tower())
    counted = computed(model.up)
    assert enable_fp8_all_gather(model) == ["down"] and counted.count == 0


# ------------------------------------------------------------------------------------------------------ experts


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_stack_of_experts_is_computed_once_a_forward(recipe: str) -> None:
    experts = convert_to_fp8(layer("gpt_oss").experts, recipe)
    counted = [computed(experts, name) for name in ("gate_up_proj", "down_proj", "down_proj_bias")]

    def count(wanted: int, what: str) -> None:
        assert [of.count for of in counted] == [wanted] * 3, what
        for of in counted:
            of.count = 0

    for _ in range(2):
        experts(hidden(), *routing()).float().sum().backward()
        count(1, "a forward and its backward")
        fp8_step(experts)
        count(0, "an iteration's end")
    look_around(experts)
    copied = copy.deepcopy(experts)
    experts.bfloat16().float()
    convert_to_fp8(experts)
    assert set(copied.state_dict()) == set(experts.state_dict())
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    copied(hidden(), *routing()).float().sum().backward()
    optimizer.step()
    assert copied.fp8_group.states[torch.device("cpu")].missing_end, (
        "the optimizer of a copy steps what its stacks are computed from"
    )
    count(0, "states, moves, copies and reports")


def test_a_compiled_module_of_experts_computes_its_stacks_once() -> None:
    experts = convert_to_fp8(layer("mixtral").experts, "tensorwise")
    experts(hidden(), *routing())
    parametrizations.spectral_norm(experts, "gate_up_proj")
    twin = copy.deepcopy(experts)
    compiled = torch.compile(experts, backend="eager")
    assert_same_bytes(compiled(hidden(), *routing()).detach(), twin(hidden(), *routing()).detach())
    assert_all_same_bytes(experts.buffers(), twin.buffers())


# -------------------------------------------------------------------------------------------------- where it is


def test_a_weight_of_hooks_is_where_its_parameters_are() -> None:
    """The tensor that hooks left in the layer stays behind when the layer is moved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = made("weight_norms", "delayed")
    train(model, sgd(model), range(2))
    model.to("meta")
    assert model.up.weight.device.type == "cpu" and model.up.fp8_device.type == "meta"


def test_a_pickle_of_a_model_with_hooks() -> None:
    model = made("pruned", "tensorwise")
    model(batch(0)).sum().backward()
    with torch.no_grad():
        model(batch(0))  # the hook leaves a weight without a graph, which a pickle can hold
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert_same_bytes(again(batch(0)).detach(), model(batch(0)).detach())


def test_a_frozen_weight_with_a_trained_bias_that_is_computed_is_frozen() -> None:
    model = convert_to_fp8(Tower(), "delayed")
    computed(model.up, "bias")
    spectral(model)
    assert {id(p) for p in model.up.sources} == {id(model.up.parametrizations.weight.original)}

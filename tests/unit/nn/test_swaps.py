"""Moves that swap parameters: torch refuses those to which anybody refers weakly, or whose views somebody keeps."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.nn import convert_to_fp8, enable_fp8_all_gather, fp8_step
from megatron_fp8.recipe import DelayedScaling
from tests.support.experts import hidden, layer, routing
from tests.support.small_training import Tower, batch

RECIPES = ["delayed", "tensorwise"]
RECIPE = DelayedScaling(amax_history_len=3)
MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "cpu": lambda model: model.cpu(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "meta": lambda model: model.to("meta"),
}


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def with_a_conv1d() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Conv1D(64, 32), nn.Linear(64, 32))


def trained(model: nn.Module, steps: int = 2) -> torch.Tensor:
    """The last loss, which its user keeps, and with it the graph."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step).detach().to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        fp8_step(model)
        optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("made", "recipe", "move"),
    [
        *((Tower, RECIPES[0], move) for move in MOVES),
        *((with_a_conv1d, RECIPES[1], move) for move in ("cpu", "double")),
    ],
)
def test_a_trained_model_moves(swapping: None, made: Callable[[], nn.Module], recipe: str, move: str) -> None:
    model = convert_to_fp8(made(), recipe, skip=[])
    loss = trained(model)
    MOVES[move](model)
    assert loss.requires_grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trained_model_with_a_weight_that_is_computed_moves(swapping: None, recipe: str) -> None:
    model = convert_to_fp8(Tower(), recipe, skip=[])
    parametrizations.weight_norm(model.up)
    loss = trained(model)
    assert model.double().up.weight.dtype == torch.float64
    assert loss.requires_grad


@pytest.mark.parametrize("move", ["cpu", "double"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_trained_experts_move(swapping: None, recipe: str, move: str) -> None:
    experts = convert_to_fp8(layer("mixtral").experts, recipe)
    loss = experts(hidden(), *routing()).float().square().mean()
    loss.backward()
    fp8_step(experts)
    experts.zero_grad()
    MOVES[move](experts)
    assert loss.requires_grad


@pytest.mark.parametrize(
    ("recipe", "gathers", "move"),
    [
        *((recipe, gathers, "cpu") for recipe in RECIPES for gathers in (False, True)),
        (RECIPES[0], False, "bfloat16"),
        (RECIPES[0], True, "to_empty"),
    ],
)
def test_a_sharded_model_moves_after_a_step(alone: None, recipe: str, gathers: bool, move: str) -> None:
    """And trains on as one that was not moved, where that changes nothing; torch trains none on in another dtype."""
    models = [convert_to_fp8(Tower(), recipe) for _ in range(2)]
    for model in models:
        if gathers:
            enable_fp8_all_gather(model)
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        trained(model)
    MOVES[move](models[0])
    if move == "cpu":
        losses = [trained(model) for model in models]
        assert_same_bytes(losses[0].detach(), losses[1].detach())


def grown() -> Tower:
    """A weight outgrew its scale in the last step."""
    model = convert_to_fp8(Tower(), RECIPE)
    trained(model, 5)
    slot = model.up.fp8_site.casts["weight"].rowwise.slot
    assert model.up.weight.abs().max() * slot.scale > 448, "it did not outgrow its scale: nothing is tested"
    return model.eval()


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_what_training_wrote_is_so_after_a_move(request: Any, swaps: bool, tied: bool) -> None:
    """Also where another module has the weight, and moves it first."""
    model = grown()
    whole = nn.ModuleDict({"tied": nn.Linear(32, 64), "model": model})
    if tied:
        whole["tied"].weight = model.up.weight
    before = model(batch(9)).detach()
    if swaps:
        request.getfixturevalue("swapping")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.cpu()
        assert_same_bytes(model(batch(9)).detach(), before)
        whole.double()  # exact, and back
        whole.float()
        assert_same_bytes(model(batch(9)).detach(), before)
        assert_same_bytes(copy.deepcopy(model)(batch(9)).detach(), before)


@pytest.mark.parametrize("swaps", [False, True])
def test_what_somebody_else_wrote_is_not_the_trainings_after_a_move(request: Any, swaps: bool) -> None:
    model = grown()
    with torch.no_grad():
        model.up.weight.mul_(1.5)
    if swaps:
        request.getfixturevalue("swapping")
    model.double().float()
    with pytest.warns(UserWarning, match="replaced"):
        model(batch(9))


def swap(model: Tower) -> None:
    torch.utils.swap_tensors(model.up.weight, nn.Parameter(1.5 * model.up.weight.detach()))


def data(model: Tower) -> None:
    model.up.weight.data = 1.5 * model.up.weight.data


def test_nobody_refers_to_a_weight() -> None:
    model = convert_to_fp8(Tower(), RECIPE)
    loss = trained(model)
    assert not weakref.getweakrefs(model.up.weight)
    gone = weakref.ref(model.up.weight)
    loss = loss.detach()
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())
    assert gone() is None, "a weight that was replaced is kept"

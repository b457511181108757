"""What belongs to an iteration (state/iteration.py): in evaluation mode what does in training, once a backward comes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.nn import convert_to_fp8, fp8_autocast, fp8_step
from megatron_fp8.nn.trainer import Fp8Trainer
from megatron_fp8.state.iteration import IterationCounts
from tests.support.small_training import (
    DELAYED,
    ROUTES,
    Tower,
    assert_same_state,
    batch,
    called,
    sgd,
    tower,
    train,
)

RECIPES = [DELAYED, "tensorwise", "rowwise", "blockwise", "mxfp8"]


pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Twin:
    """Delayed scaling of one tensor by its definition, in Python's float64: amaxes of three iterations."""

    def __init__(self) -> None:
        self.history: list[float] = [0.0, 0.0, 0.0]

    def end(self, tensors: list[torch.Tensor]) -> None:
        amax = max(float(x.detach().double().abs().max()) for x in tensors)
        self.history = [*self.history[1:], amax]


@pytest.mark.parametrize("route", ROUTES)
def test_histories_are_those_of_the_definition_in_evaluation_mode(route: str) -> None:
    """In training mode they are the same: the next test."""
    model, twin = tower(DELAYED, training=False), Twin()
    call, optimizer = called(model, route), sgd(model)
    for step in range(4):
        xs = [batch(10 * step + i) * (i + 1) for i in range(2)]
        for x in xs:
            call(x).square().mean().backward()
        fp8_step(model)
        optimizer.step()
        optimizer.zero_grad()
        twin.end(xs)
    slot = model.up.fp8_site.quantizers["input"].slot
    assert slot.arena.saved_slot(slot)["amax_history"].tolist()[1:] == twin.history[1:]
    assert slot.scale == torch.tensor(448.0) / torch.tensor(max(twin.history))


@pytest.mark.parametrize(
    ("recipe", "route"),
    [*((DELAYED, route) for route in ROUTES), *((recipe, "eager") for recipe in RECIPES[1:])],
    ids=str,
)
def test_training_in_evaluation_mode_is_training(recipe: object, route: str) -> None:
    """Losses, weights, histories, scales and the verdict on health."""
    models = [tower(recipe, training=training) for training in (True, False)]
    calls, optimizers = [called(m, route) for m in models], [sgd(m) for m in models]
    for step in range(4):
        losses, healths = [], []
        for model, call, optimizer in zip(models, calls, optimizers, strict=True):
            loss = call(batch(step)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            counts = fp8_step(model)
            assert counts.fp8_gemms and counts.casts
            healths.append(counts.nonfinite)
            optimizer.step()
            optimizer.zero_grad()
        assert healths == [0, 0]
        assert_same_bytes(*losses)
        assert_same_state(*models)


@pytest.mark.parametrize("enabled", [True, False])
def test_counts_are_those_of_training(enabled: bool) -> None:
    wanted = IterationCounts(fp8_gemms=6, casts=6) if enabled else IterationCounts(hp_gemms=6)
    for training in (True, False):
        model = tower("tensorwise", training=training)
        with fp8_autocast(enabled=enabled):
            model(batch(0)).sum().backward()
        assert fp8_step(model) == wanted


@pytest.mark.parametrize("route", ROUTES)
def test_an_evaluation_that_no_backward_follows_leaves_no_trace(route: str) -> None:
    model, twin = tower(DELAYED), tower(DELAYED)
    for each in (model, twin):
        train(each, sgd(each), range(2))
    model.eval()
    call = called(model, route)
    call(batch(7) * torch.inf)
    with torch.no_grad():
        call(batch(8) * torch.inf)
    assert_same_state(model, twin)
    assert not model.up.fp8_site.state.ran
    for each in (model, twin):
        train(each.train(), sgd(each), range(2, 4))
    assert_same_state(model, twin)


@pytest.mark.parametrize("route", ["eager", "compiled"])
def test_a_second_backward_through_the_same_forward_records_it_once(route: str) -> None:
    """Also in the next iteration, to which the forward does not belong."""
    model = tower(DELAYED, training=False)
    x = batch(0).detach()
    x[0, 0] = torch.inf
    y = called(model.up, route)(x).nan_to_num(posinf=0).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)
    counts = fp8_step(model)
    assert (counts.nonfinite, counts.fp8_gemms) == (1, 1 + 2)  # fprop, and wgrad twice
    y.backward()
    counts = fp8_step(model)
    assert (counts.nonfinite, counts.fp8_gemms) == (0, 1)


class Frozen(nn.Module):
    """A backbone that train() keeps in evaluation mode, under a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.head = Tower(), nn.Linear(32, 32)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.backbone(x))
        return y


def test_the_trainer_skips_a_step_of_a_backbone_in_evaluation_mode() -> None:
    model = convert_to_fp8(Frozen(), DELAYED)
    trainer = Fp8Trainer(model, sgd(model), lambda model, x: model(x).square().mean())
    before = copy.deepcopy(model.state_dict())
    x = batch(0).detach()
    x[3, 4] = torch.inf
    step = trainer.train_step(x)
    assert step.skipped and step.nonfinite
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not trainer.train_step(batch(1)).skipped


@pytest.mark.parametrize("route", ["eager", "compiled"])
def test_a_forgotten_fp8_step_is_noticed_in_evaluation_mode(route: str) -> None:
    model = tower(DELAYED, training=False)
    call, optimizer = called(model, route), sgd(model)
    call(batch(0)).sum().backward()
    optimizer.step()
    loss = call(batch(1)).sum()  # an evaluation, for all that is known
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        loss.backward()
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        model.train()(batch(2))
    fp8_step(model)
    model.eval()
    call(batch(3)).sum().backward()

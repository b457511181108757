"""What belongs to an iteration (state/iteration.py): in evaluation mode what does in training, once a backward comes.
And which steps of optimizers end one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.nn import (
    convert_to_fp8,
    fp8_autocast,
    fp8_state_dict,
    fp8_step,
    load_fp8_state_dict,
    register_fp8_step,
)
from megatron_fp8.nn.trainer import Fp8Trainer
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.counts import IterationCounts
from tests.support.tower import DELAYED, Tower, assert_same_state, batch, sgd, train

RECIPES = [DELAYED, "tensorwise", "rowwise", "blockwise", "mxfp8"]
ROUTES = ["eager", "compiled", "reentrant", "non-reentrant"]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def called(model: nn.Module, route: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model's forward, compiled or under one of torch's two ways of checkpointing."""
    if route == "eager":
        return model
    if route == "compiled":
        return torch.compile(model, backend="aot_eager")
    return lambda x: checkpoint(model, x, use_reentrant=route == "reentrant")


def tower(recipe: object, *, training: bool = True, seed: int = 0) -> Tower:
    model: Tower = convert_to_fp8(Tower(seed), recipe)
    return model.train(training)


class Twin:
    """Delayed scaling of one tensor by its definition, in Python's float64: amaxes of three iterations."""

    def __init__(self) -> None:
        self.history: list[float] = [0.0, 0.0, 0.0]

    def end(self, tensors: list[torch.Tensor]) -> None:
        amax = max(float(x.detach().double().abs().max()) for x in tensors)
        self.history = [*self.history[1:], amax]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_histories_are_those_of_the_definition_in_either_mode(route: str, training: bool) -> None:
    model, twin = tower(DELAYED, training=training), Twin()
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


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
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


def test_counts_are_those_of_training() -> None:
    counted = []
    for training in (True, False):
        model = tower(DELAYED, training=training)
        model(batch(0)).sum().backward()
        counted.append(fp8_step(model))
    assert counted[0] == counted[1] == IterationCounts(fp8_gemms=6, casts=6)


def test_counts_of_high_precision_are_those_of_training() -> None:
    counted = []
    for training in (True, False):
        model = tower("tensorwise", training=training)
        with fp8_autocast(enabled=False):
            model(batch(0)).sum().backward()
        counted.append(fp8_step(model))
    assert counted[0] == counted[1] == IterationCounts(hp_gemms=6)


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


def test_a_forward_without_gradients_records_nothing_in_training_mode_either() -> None:
    model, twin = tower(DELAYED), tower(DELAYED)
    for each in (model, twin):
        train(each, sgd(each), range(2))
    with torch.no_grad():
        model(batch(7) * 1000)
    assert_same_state(model, twin)


@pytest.mark.parametrize("route", ROUTES)
def test_an_infinity_is_counted_in_evaluation_mode(route: str) -> None:
    model = tower("tensorwise", training=False)
    x = batch(0).detach()
    x[0, 0] = torch.inf
    called(model, route)(x.requires_grad_()).sum().backward()
    assert fp8_step(model).nonfinite >= 1
    called(model, route)(batch(1)).sum().backward()
    assert fp8_step(model).nonfinite == 0


def test_a_second_backward_through_the_same_forward_records_it_once() -> None:
    model = tower("tensorwise", training=False)
    x = batch(0).detach()
    x[0, 0] = torch.inf
    y = model.up(x).nan_to_num(posinf=0).sum()
    y.backward(retain_graph=True)
    y.backward()
    counts = fp8_step(model)
    assert (counts.nonfinite, counts.fp8_gemms) == (1, 1 + 2)  # fprop, and wgrad twice


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


@pytest.mark.parametrize("route", ROUTES)
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


# ------------------------------------------------------------------------------------------------------ recomputation


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("around", ["off", "recipe"])
def test_a_recomputation_runs_as_its_forward_did(around: str, training: bool, reentrant: bool) -> None:
    """FP8 is switched around the forward alone; an equal model whose activations are kept has the same gradients."""

    def switched() -> object:
        return fp8_autocast(enabled=False) if around == "off" else fp8_autocast(recipe="mxfp8")

    found = []
    for recompute in (True, False):
        model = tower("tensorwise", training=training)
        call = called(model, "reentrant" if reentrant else "non-reentrant") if recompute else model
        x = batch(0).detach().requires_grad_()
        with switched():  # type: ignore[attr-defined]
            y = call(x)
        y.square().mean().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for again, kept in zip(*found, strict=True):
        assert_same_bytes(again, kept)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_recomputation_runs_as_its_forward_did_inside_a_switch(training: bool, reentrant: bool) -> None:
    """The other way round: FP8 is switched off around the backward alone."""
    found = []
    for recompute in (True, False):
        model = tower("tensorwise", training=training)
        call = called(model, "reentrant" if reentrant else "non-reentrant") if recompute else model
        x = batch(0).detach().requires_grad_()
        y = call(x)
        with fp8_autocast(enabled=False):
            y.square().mean().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for again, kept in zip(*found, strict=True):
        assert_same_bytes(again, kept)


@pytest.mark.parametrize("training", [True, False])
def test_forwards_that_differed_are_told_apart_or_refused(training: bool) -> None:
    """One in high precision came earlier in the iteration: which one is recomputed nobody says."""
    model = tower("tensorwise", training=training)
    with fp8_autocast(enabled=False):
        model(batch(1))
    y = checkpoint(model, batch(0), use_reentrant=True)
    with pytest.raises(RuntimeError, match="remember_fp8"):
        y.sum().backward()


def test_a_mode_that_changes_before_the_backward_is_no_guess() -> None:
    """The layer is in evaluation mode when its training forward is recomputed, and evaluated in high precision before."""
    model = tower("tensorwise")
    y = checkpoint(model, batch(0), use_reentrant=True)
    with fp8_autocast(enabled=False), torch.no_grad():
        model.eval()(batch(1))
    with pytest.raises(RuntimeError, match="remember_fp8"):
        y.sum().backward()


def test_a_recomputation_after_the_end_of_its_iteration_runs_as_its_forward_did() -> None:
    found = []
    for recompute in (True, False):
        model = tower("tensorwise")
        with fp8_autocast(enabled=False):
            y = called(model, "reentrant" if recompute else "eager")(batch(0))
        fp8_step(model)
        y.square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for again, kept in zip(*found, strict=True):
        assert_same_bytes(again, kept)


def test_an_evaluation_in_another_precision_does_not_concern_training() -> None:
    model = tower("tensorwise")
    with fp8_autocast(enabled=False), torch.no_grad():
        model.eval()(batch(1))
    model.train()
    checkpoint(model, batch(0), use_reentrant=True).sum().backward()
    assert fp8_step(model).fp8_gemms


# -------------------------------------------------------------------------------------------- forwards inside a backward


def test_a_forward_inside_a_backward_is_a_forward() -> None:
    """A hook trains a second tower: histories and counts are those of the tower trained by itself."""
    outer, inner, twin = tower(DELAYED), tower(DELAYED, seed=1), tower(DELAYED, seed=1)
    x = batch(3).detach()
    x[0, 0] = torch.inf

    def hook(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            inner(x).sum().backward()

    y = outer(batch(0))
    y.register_hook(hook)
    y.sum().backward()
    twin(x).sum().backward()
    fp8_step(outer)
    assert fp8_step(inner) == fp8_step(twin) and fp8_state_dict(inner).keys() == fp8_state_dict(twin).keys()
    for name, value in fp8_state_dict(twin).items():
        assert_same_bytes(fp8_state_dict(inner)[name], value, name)
    assert bool(fp8_state_dict(inner)["up.weight.warm"])


def test_what_a_hook_says_of_fp8_holds_for_its_forward() -> None:
    model = tower("tensorwise")
    found: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> None:
        with fp8_autocast(enabled=False):
            found.append(model(batch(1)))

    y = model(batch(0))
    y.register_hook(hook)
    y.sum().backward()
    with fp8_autocast(enabled=False):
        assert_same_bytes(found[0], model(batch(1)).detach())


# --------------------------------------------------------------------------------------------------- steps that train


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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
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

"""Forwards inside a backward: recomputations run as their forwards did, and a hook's own forward is a forward."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.nn import fp8_autocast, fp8_state_dict, fp8_step
from tests.support.small_training import DELAYED, batch, called, tower


@pytest.mark.parametrize(
    ("around", "training", "reentrant"),
    [("off", True, True), ("off", False, False), ("recipe", True, False), ("recipe", False, True)],
)
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
        recorded = model.up.fp8_site.state.arenas[0].rows
        found.append([x.grad, *(p.grad for p in model.parameters()), recorded])
    assert_all_same_bytes(*found)


@pytest.mark.parametrize(("training", "reentrant"), [(True, False), (False, True)])
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
    assert_all_same_bytes(*found)


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
    assert_all_same_bytes(*found)


def test_an_evaluation_in_another_precision_does_not_concern_training() -> None:
    model = tower("tensorwise")
    with fp8_autocast(enabled=False), torch.no_grad():
        model.eval()(batch(1))
    model.train()
    checkpoint(model, batch(0), use_reentrant=True).sum().backward()
    assert fp8_step(model).fp8_gemms


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
    assert_all_same_bytes(fp8_state_dict(inner), fp8_state_dict(twin))
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

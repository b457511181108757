"""Every tensor of the state is looked at in one round, and what is found has its name. Real optimizers:
tests/functional/test_damaged_memory.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fp8.mcore.optimizer.adam import Moment
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.arena import Arena
from megatron_fp8.train.health import finite_check
from megatron_fp8.train.health.finite_check import PARTS, FiniteCheck


def watched(
    monkeypatch: pytest.MonkeyPatch, count: int = 30, arenas: Sequence[Arena] = ()
) -> tuple[FiniteCheck, dict[Any, Any]]:
    """A check over masters of `count` weights, their second moments, and arenas; the optimizer's state."""
    weights = [(f"layer{i}.weight", torch.ones(3, dtype=torch.float32)) for i in range(count)]
    model = SimpleNamespace(config=None)
    state = {w: {"exp_avg_sq": torch.ones(3, dtype=torch.float32), "step": 3} for _, w in weights}
    part = SimpleNamespace(param_groups=[{"params": [w for _, w in weights]}])
    part.optimizer = SimpleNamespace(state=state)
    monkeypatch.setattr(finite_check, "unwrap", lambda chunk: chunk)
    monkeypatch.setattr(finite_check, "named_parameters", lambda model: weights)
    monkeypatch.setattr(finite_check, "state_of", lambda config: SimpleNamespace(arenas=arenas))
    return FiniteCheck([model], part), state


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_whatever_goes_bad_is_found_once_in_a_round_and_named(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    for index in range(0, 30, 4):
        check, state = watched(monkeypatch)
        assert sum(float(check.turn()) for _ in range(PARTS)) == 0 and not check.first() and not check.all()
        list(state.values())[index]["exp_avg_sq"][1] = value
        assert [float(check.turn()) for _ in range(PARTS)].count(1.0) == 1
        assert (
            float(check.all()) == 1 and check.first() == f"exp_avg_sq of layer{index}.weight holds NaN or Inf"
        )


def test_a_moment_in_fewer_bits_is_looked_at_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    check, state = watched(monkeypatch, 1)
    (moments,) = state.values()
    for eight in (True, False):
        moments["exp_avg_sq"] = Moment(torch.ones(256, dtype=torch.float32), eight)
        assert not check.all()
        moments["exp_avg_sq"].stored_tensors()[-1].view(-1)[-1] = math.inf
        assert float(check.all()) == 1


def test_large_values_are_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sum would be infinite."""
    check, state = watched(monkeypatch, 1)
    next(iter(state)).fill_(3e38)
    assert not check.all()


@pytest.mark.parametrize(
    ("kept", "value"), [("rows", math.nan), ("rows", 9.0), ("maxima", math.inf), ("maxima", 9.0)]
)
def test_histories_are_looked_at(monkeypatch: pytest.MonkeyPatch, kept: str, value: float) -> None:
    """Also before their first iteration, and where a finite number is not what was recorded."""
    arena = Arena(None, torch.device("cpu"))
    slots = [arena.add(DelayedScaling(), fmt) for fmt in (E4M3, E5M2, E5M2)]
    check, _ = watched(monkeypatch, 1, [arena])
    assert not check.all() and not check.first()
    for iteration in range(3):
        arena.rows[0] = 2.0
        arena.update(iteration)
    assert sum(float(check.turn()) for _ in range(PARTS)) == 0 and not check.all()
    rings = arena.histories()[1].rings
    getattr(rings, kept)[20, slots[2].column].view(-1)[:1] = value
    assert sum(float(check.turn()) for _ in range(PARTS)) == 1 and float(check.all()) == 1
    assert check.first() == "the amax histories of slot1 and 1 others hold a value that no cast recorded"


LAYERS = (
    "layers.0.fc1",
    "layers.0.fc2",
    "layers.1.attention.linear_proj",
    "layers.1.attention.linear_qkv",
    "layers.1.fc1",
)
"""As Megatron-Core creates them: the attention's projection before what it reads."""


def first_cause(
    monkeypatch: pytest.MonkeyPatch, bad: Sequence[str], *, stage: int = 0
) -> tuple[str | None, int]:
    """What is named first on a rank of the first or second of two stages where these have NaN; its place in the order."""
    arena = Arena(None, torch.device("cpu"))
    for layer in LAYERS:
        for role in ("input", "weight", "grad_output", "grad_output.wgrad", "grad_output (left)"):
            arena.add(None, E5M2).name = f"{layer}.{role}"
    weights = [
        (f"{layer}.weight", torch.nn.Parameter(torch.ones(3, dtype=torch.float32))) for layer in LAYERS
    ]
    for name, weight in weights:
        weight.grad = torch.full_like(weight, math.nan if f"{name}.grad" in bad else 1.0)
    for slot in arena.slots:
        arena.rows[1, slot.index] = float(slot.name in bad)
    arena.reduce()
    watched(monkeypatch, 0, [arena])
    monkeypatch.setattr(finite_check, "named_parameters", lambda model: weights)
    for function, number in (("rank", stage), ("world_size", 2)):
        monkeypatch.setattr(
            finite_check.parallel_state,
            f"get_pipeline_model_parallel_{function}",
            lambda number=number: number,
        )
    found: list[Any] = []
    monkeypatch.setattr(finite_check, "first_rank_with", lambda own, order: found.append((own, order)))
    finite_check.first_not_finite([SimpleNamespace(config=None)])
    ((own, order),) = found
    return own and own[1], order


@pytest.mark.parametrize(
    ("bad", "first"),
    [
        ((), None),
        # A loss that is NaN: its gradient comes to the last layer first.
        ([f"{layer}.grad_output" for layer in LAYERS], "the FP8 cast of layers.1.fc1.grad_output"),
        ([f"{layer}.weight.grad" for layer in LAYERS], "the gradient of layers.1.fc1.weight"),
        # The guard moved its site to BF16, or moved it just now.
        (["layers.0.fc1.grad_output (left)"], "layers.0.fc1.grad_output"),
        (
            ["layers.0.fc1.grad_output (left)", "layers.1.fc1.grad_output"],
            "the FP8 cast of layers.1.fc1.grad_output",
        ),
        # A gradient that two GEMMs cast differently is no input.
        (["layers.0.fc1.grad_output.wgrad", "layers.0.fc2.input"], "the FP8 cast of layers.0.fc2.input"),
        (["layers.0.fc2.input", "layers.1.fc1.input"], "the FP8 cast of layers.0.fc2.input"),
        (
            [f"layers.1.attention.linear_{name}.input" for name in ("proj", "qkv")],
            "the FP8 cast of layers.1.attention.linear_qkv.input",
        ),
    ],
)
def test_the_first_in_the_order_of_execution_is_named(
    monkeypatch: pytest.MonkeyPatch, bad: Sequence[str], first: str | None
) -> None:
    named, _ = first_cause(monkeypatch, bad)
    assert named == first or (first and named and named.startswith(f"{first} "))


def test_gradients_come_from_the_last_stage_and_after_every_input(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [first_cause(monkeypatch, ["layers.0.fc1.grad_output"], stage=stage)[1] for stage in (0, 1)]
    inputs = [first_cause(monkeypatch, ["layers.1.fc1.input"], stage=stage)[1] for stage in (0, 1)]
    assert inputs[0] < inputs[1] < gradients[1] < gradients[0]

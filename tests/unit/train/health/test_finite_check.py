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

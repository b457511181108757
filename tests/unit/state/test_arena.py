"""The arena: delayed scaling against plain Python written from docs/numerics.md, health, collectives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.arena import Arena, Slot
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.delayed import PlainSlot
from tests.support.draws import draws
from tests.support.slots import make_slots, observe

INF = math.inf
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_equals_plain(arena: Arena, slots: list[Slot], plain: list[PlainSlot], recipe: DelayedScaling):
    for slot, expected in zip(slots, plain, strict=True):
        what = f"slot {slot.index}"
        assert_same_bytes(slot.scale, np.float32(expected.scale), f"{what} scale")
        assert slot.warm == expected.warm, what
        index, rows = arena.history(recipe, slot.fmt)
        column = index.tolist().index(slot.index)
        assert_same_bytes(rows[:, column], np.array(expected.rows, dtype=np.float32), f"{what} history")


OBSERVATION = st.one_of(
    st.sampled_from([0.0, 0.0, INF, 1e-45, 2.0**-126, 1.0, 448.0, 57344.0, 3.4e38]),
    st.floats(0.0, 1e6, width=32),
    st.floats(0.0, width=32, allow_infinity=False, allow_nan=False),
)
RECIPE = st.builds(
    DelayedScaling,
    amax_history_len=st.sampled_from([1, 4, 1024]),
    amax_compute_algo=st.sampled_from(["max", "most_recent"]),
    margin=st.sampled_from([0, 0, 3]),
    interval=st.sampled_from([1, 1, 3]),
    amax_epsilon=st.sampled_from([0.0, 0.0, 0.5]),
)
ITERATIONS = st.lists(st.lists(st.lists(OBSERVATION, max_size=3), min_size=3, max_size=3), max_size=8)


@draws(150)
@given(recipe=RECIPE, iterations=ITERATIONS)
def test_update_equals_the_written_rule(recipe, iterations):
    """Three slots in two formats, each seen any number of times an iteration."""
    formats = [E4M3, E5M2, E4M3]
    state = Fp8State()
    arena = state.arena(None)
    slots = make_slots(arena, recipe, formats)
    plain = [PlainSlot(recipe, LARGEST[fmt.name]) for fmt in formats]
    for iteration, seen in enumerate(iterations):
        for slot, expected, values in zip(slots, plain, seen, strict=True):
            for value in values:
                observe(slot, value)
            expected.update(float(np.float32(max(values, default=0.0))), iteration)
        state.finish_iteration()
        assert_equals_plain(arena, slots, plain, recipe)


def one_slot(**options: Any) -> tuple[Fp8State, Slot, DelayedScaling]:
    recipe = DelayedScaling(**{"amax_history_len": 4, **options})
    state = Fp8State()
    return state, state.arena(None).add(recipe, E4M3), recipe


def test_infinite_amax_changes_nothing_but_is_counted():
    state, slot, recipe = one_slot()
    for amax in (2.0, 3.0):
        observe(slot, amax)
        state.finish_iteration()
    scale, rows = slot.scale, slot.arena.history(recipe, E4M3)[1].clone()
    observe(slot, INF, nonfinite=5)
    observe(slot, 100.0)
    assert state.finish_iteration().nonfinite == 5
    assert_same_bytes(slot.scale, scale)
    assert_same_bytes(slot.arena.history(recipe, E4M3)[1], rows)
    observe(slot, 7.0)
    assert state.finish_iteration().nonfinite == 0
    assert slot.scale == 448 / torch.tensor(7.0)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_scale_that_no_update_made_is_counted_and_made_anew(scale: float):
    state, slot, _ = one_slot()
    observe(slot, 2.0)
    assert state.finish_iteration().nonfinite == 0
    slot.arena.scale[slot.index] = scale
    observe(slot, 7.0)
    assert state.finish_iteration().nonfinite == 1
    assert slot.arena.own_damage[:, slot.index].tolist() == [True, False]
    assert slot.scale == 448 / torch.tensor(7.0)
    observe(slot, 7.0)
    assert state.finish_iteration().nonfinite == 0 and not slot.arena.own_damage.any()


@pytest.mark.parametrize("amax", [math.nan, math.inf])
def test_an_amax_that_no_cast_recorded_is_counted_and_changes_nothing(amax: float):
    state, slot, recipe = one_slot()
    observe(slot, 2.0)
    state.finish_iteration()
    scale, rows = slot.scale, slot.arena.history(recipe, E4M3)[1].clone()
    slot.arena.rows[0, slot.index] = amax
    assert state.finish_iteration().nonfinite == 1
    assert slot.arena.own_damage[:, slot.index].tolist() == [False, True]
    assert_same_bytes(slot.scale, scale)
    assert_same_bytes(slot.arena.history(recipe, E4M3)[1], rows)


def test_slots_added_later_join_with_an_empty_history():
    state, first, recipe = one_slot()
    arena = first.arena
    observe(first, 2.0)
    state.finish_iteration()
    late = [arena.add(recipe, E4M3 if i % 2 else E5M2) for i in range(200)]
    assert first.scale == 224 and first.warm and not any(slot.warm for slot in late)
    observe(first, 4.0)
    for i, slot in enumerate(late):
        observe(slot, float(i + 1))
    state.finish_iteration()
    assert first.scale == 112
    assert all(slot.warm for slot in late)
    assert [slot.scale.item() for slot in late] == [
        np.float32(LARGEST[slot.fmt.name]) / np.float32(i + 1) for i, slot in enumerate(late)
    ]
    index, rows = arena.history(recipe, E4M3)
    assert rows[:, 0].tolist() == [0, 0, 2, 4] and rows[:, 1].tolist() == [0, 0, 0, 2]
    assert index.tolist()[:3] == [0, 2, 4]


def test_recipes_of_one_arena_keep_apart():
    state = Fp8State()
    arena = state.arena(None)
    most_recent = arena.add(DelayedScaling(amax_compute_algo="most_recent"), E4M3)
    largest = arena.add(DelayedScaling(), E4M3)
    other = arena.add(None, E4M3)
    for amax in (8.0, 2.0):
        for slot in (most_recent, largest, other):
            observe(slot, amax)
        state.finish_iteration()
    assert most_recent.scale == 224 and largest.scale == 56
    assert other.scale == 1 and not other.warm
    assert arena.last_amax.tolist() == [2, 2, 2]


def test_saved_scale_is_a_copy():
    state, slot, _ = one_slot()
    observe(slot, 2.0)
    state.finish_iteration()
    kept = slot.scale
    observe(slot, 200.0)
    state.finish_iteration()
    assert kept == 224 and slot.scale != 224

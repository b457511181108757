"""Fp8State: what an iteration did, the phase it is in, and who shares it."""

import copy

import pytest

from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.state.precision_schedule import PrecisionSchedule
from tests.support.slots import make_slots, observe


def test_finish_iteration_counts_once_and_starts_anew():
    state = Fp8State()
    arena, other = state.arena(None), state.arena(None)
    assert arena is other, "one arena a group"
    slots = make_slots(arena, DelayedScaling(), [E4M3, E5M2])
    assert state.slots() == slots
    state.counts.fp8_gemms += 3
    arena.counter.current.casts += 2
    observe(slots[0], 1.0, nonfinite=2)
    observe(slots[0], 1.0, nonfinite=2)
    observe(slots[1], 1.0, nonfinite=1)
    counts = state.finish_iteration()
    assert (counts.fp8_gemms, counts.casts, counts.nonfinite, counts.amax_collectives) == (3, 2, 5, 0)
    assert state.last is counts and (state.iteration, state.weight_generation) == (1, 1)
    arena.counter.current.casts += 1
    counts = state.finish_iteration()
    assert (counts.fp8_gemms, counts.casts, counts.nonfinite) == (0, 1, 0)
    assert (state.iteration, state.weight_generation) == (2, 2)


def test_deep_copies_of_a_config_share_the_state():
    state = Fp8State()
    assert copy.deepcopy({"config": [state]})["config"][0] is state


def test_the_phase_follows_the_iteration():
    state = Fp8State(phases=PrecisionSchedule(warmup=0.5, length=2))
    assert state.phase == "warm-up"
    state.finish_iteration()
    assert state.phase == "fp8"
    state.phases = PrecisionSchedule(healing=0.5, length=2)
    assert state.phase == "healing"
    state.phases = PrecisionSchedule(warmup=0.5)
    assert state.phase is None
    with pytest.raises(ValueError, match="set_training_length"):
        state.known_phase()

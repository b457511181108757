"""The guard's look at an arena: which illness, for how long, and by which scale."""

import math

import pytest
import torch

from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.state.guard import Guard, Move, Thresholds, as_overrides
from megatron_fp8.state.precision_schedule import PrecisionSchedule
from tests.support.slots import observe

RECIPE = DelayedScaling(amax_history_len=64)


def make(patience=2, *, delayed=RECIPE, fmt=E4M3):
    state = Fp8State(guard=Guard(Thresholds(patience)))
    slot = state.arena(None).add(delayed, fmt)
    slot.name = "fc1.input"
    return state, slot


def run(state, slot, amaxes, nonfinite=0):
    """Iterations with these amaxes; what was found in each, as (illness, iterations)."""
    found = []
    for amax in amaxes:
        if amax is not None:
            observe(slot, amax, nonfinite)
        state.finish_iteration()
        found.append([(f.illness, f.iterations) for f in state.findings])
    return found


def test_healthy_tensors_are_left_alone():
    state, slot = make()
    assert run(state, slot, [1.0, 1.9, 0.7, 1.3, 0.01]) == [[]] * 5


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_saturation_is_by_the_scale_that_was_used(fmt):
    """The update after the iteration would make a scale that fits: looked at by that one nothing ever saturates."""
    state, slot = make(fmt=fmt)
    assert run(state, slot, [1.0, 3.0, 9.0, 27.0, 28.0]) == [
        [],
        [],
        [("saturates", 2)],
        [("saturates", 3)],
        [],
    ]
    assert run(state, slot, [28.0 * 2, 28.0 * 2 * 2.0]) == [[], []]  # at the threshold, and not beyond it


def test_the_figure_is_the_share_of_the_range():
    state, slot = make(patience=1)
    run(state, slot, [1.0, 3.0])
    (found,) = state.findings
    assert found.slot == "fc1.input" and found.figure == pytest.approx(3.0)
    assert "saturates for 1 iterations (amax 3 of FP8's range)" in str(found)


def test_underflow_is_a_scale_left_from_a_spike():
    state, slot = make()
    assert run(state, slot, [1000.0, 0.5, 0.5, 0.5]) == [[], [], [("underflows", 2)], [("underflows", 3)]]


@pytest.mark.parametrize("margin", [0, 5, 8, 12])
def test_headroom_that_was_asked_for_is_no_underflow(margin):
    """Ten binary orders below where the margin puts the amax are; so is an amax that becomes zero itself."""
    state, slot = make(patience=1, delayed=DelayedScaling(amax_history_len=64, margin=margin))
    assert run(state, slot, [1.0, 1.0, 0.9]) == [[]] * 3
    ill = 2.0 ** -min(10, 18.8 - margin)
    assert run(state, slot, [ill * 1.1, ill * 0.9]) == [[], [("underflows", 1)]]


def test_a_margin_that_makes_everything_zero_is_ill():
    state, slot = make(patience=1, delayed=DelayedScaling(amax_history_len=64, margin=19))
    assert run(state, slot, [1.0, 1.0]) == [[], [("underflows", 1)]]


def test_an_illness_starts_anew_after_health_or_another():
    state, slot = make()
    assert run(state, slot, [1.0, 3.0, 3.0, 9.0, 27.0]) == [[], [], [], [], [("saturates", 2)]]
    state, slot = make()
    assert run(state, slot, [1000.0, 0.5, 4000.0, 0.5, 0.5])[-2:] == [[], [("underflows", 2)]]


def test_a_resume_counts_on():
    state, slot = make(patience=3)
    run(state, slot, [1.0, 3.0, 9.0])
    other, again = make(patience=3)
    run(other, again, [9.0])
    other.guard.load_rows([list(row) for row in state.guard.rows()])  # a manifest has lists
    assert state.guard.rows() == [("fc1.input", "saturates", 2)]
    assert run(state, slot, [27.0]) == run(other, again, [27.0]) == [[("saturates", 3)]]


def test_what_is_not_cast_stays_as_ill_as_it_was():
    state, slot = make()
    assert run(state, slot, [1.0, 3.0, None, 0.0, 9.0]) == [[], [], [], [], [("saturates", 2)]]


@pytest.mark.parametrize("delayed", [RECIPE, None])
def test_not_finite_in_every_recipe(delayed):
    state, slot = make(delayed=delayed)
    assert run(state, slot, [math.inf, math.inf], nonfinite=5) == [[], [("not finite", 2)]]
    assert state.findings[0].figure == 5.0


def test_scales_made_from_the_tensor_never_saturate():
    state, slot = make(patience=1, delayed=None)
    assert run(state, slot, [1.0, 1e30, 1e-30]) == [[]] * 3


def test_a_move_is_a_new_start_for_its_site_alone():
    state, slot = make()
    run(state, slot, [1.0, 3.0])
    assert state.guard is not None
    state.guard.moved(Move("fc1", "tensorwise", 2, "it saturates"))
    assert run(state, slot, [9.0]) == [[]]
    state.guard.moved(Move("fc", "bf16", 3, "another site"))
    assert run(state, slot, [27.0]) == [[("saturates", 2)]]
    assert {site: move.to for site, move in state.guard.moves.items()} == {"fc1": "tensorwise", "fc": "bf16"}


@pytest.mark.parametrize(
    ("ladder", "recipe", "illness", "to"),
    [
        ("bf16", "delayed", "saturates", "bf16"),
        ("ladder", "delayed", "saturates", "tensorwise"),
        ("ladder", "tensorwise", "underflows", "blockwise"),
        ("ladder", "blockwise", "underflows", "bf16"),
        ("ladder", "delayed", "not finite", "bf16"),
        ("ladder", "mxfp8", "not finite", "bf16"),
        ("ladder", "custom", "saturates", "bf16"),
    ],
)
def test_the_ladder(ladder, recipe, illness, to):
    assert Guard(Thresholds(), ladder).next_rung(recipe, illness) == to


def test_phases_in_high_precision_are_not_looked_at():
    """Amaxes are recorded there for histories, and nothing is cast by a scale."""
    state, slot = make(patience=1)
    state.phases = PrecisionSchedule(0.5, 0.0, 6)
    assert run(state, slot, [1.0, 9.0, 81.0, 1.0, 9.0, 900.0]) == [[], [], [], [], [], [("saturates", 1)]]


def test_moves_in_a_checkpoint_are_overrides_for_inference():
    saved = {"guard": [["fc1", "bf16", 3, "ill"], ["fc2", "tensorwise", 4, "ill"]]}
    assert as_overrides(saved) == {"fc1": "bf16", "fc2": "tensorwise"} and as_overrides({}) == {}


def test_without_a_guard_nothing_is_looked_at():
    state = Fp8State()
    slot = state.arena(None).add(None, E4M3)
    observe(slot, math.inf, 3)
    state.finish_iteration()
    assert state.findings == []


@pytest.mark.parametrize(
    "wrong", [{"patience": 0}, {"saturation": 1.0}, {"saturation": math.nan}, {"unused_bits": 0}]
)
def test_thresholds_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Thresholds(**wrong)


def test_a_cold_slot_has_no_share():
    """Its first iteration is cast by its own amax, whatever the scale in the arena says."""
    state, slot = make(patience=1)
    assert run(state, slot, [1e20]) == [[]]
    assert torch.isfinite(slot.scale)

"""Phases of a run: from fractions to iterations, and what is refused."""

from __future__ import annotations

import pytest

from megatron_fp8.state.precision_schedule import PrecisionSchedule


def phases_of(phases: PrecisionSchedule, count: int) -> list[str]:
    return [phases.at(iteration) for iteration in range(count)]


def test_without_fractions_all_is_fp8_and_no_length_is_needed():
    assert phases_of(PrecisionSchedule(), 3) == ["fp8"] * 3
    assert PrecisionSchedule().trivial and PrecisionSchedule().describe() == []
    assert phases_of(PrecisionSchedule(length=2), 5) == ["fp8"] * 5


@pytest.mark.parametrize(
    ("warmup", "healing", "length", "expected"),
    [
        (0.5, 0.0, 4, ["warm-up"] * 2 + ["fp8"] * 2),
        (0.0, 0.5, 4, ["fp8"] * 2 + ["healing"] * 2),
        (0.25, 0.25, 4, ["warm-up", "fp8", "fp8", "healing"]),
        (0.1, 0.2, 300, ["warm-up"] * 30 + ["fp8"] * 210 + ["healing"] * 60),
        (0.001, 0.001, 4, ["warm-up", "fp8", "fp8", "healing"]),
    ],
)
def test_fractions_become_iterations(warmup, healing, length, expected):
    """0.1 * 300 is not 30 in floating point; a fraction above 0 is at least one iteration."""
    phases = PrecisionSchedule(warmup, healing, length)
    assert phases_of(phases, length) == expected
    spans = phases.describe()
    assert [span["phase"] for span in spans for _ in range(span["first"], span["last"] + 1)] == expected
    assert all((span["precision"] == "fp8") == (span["phase"] == "fp8") for span in spans)
    assert spans[0]["first"] == 1 and spans[-1]["last"] == length


def test_after_the_end_the_last_phase_goes_on():
    """An evaluation after the last iteration, or a loop that runs on."""
    assert PrecisionSchedule(0.5, 0.0, 4).at(4) == "fp8"
    assert PrecisionSchedule(0.0, 0.5, 4).at(4) == "healing"


def test_a_fraction_of_nothing_known_names_the_remedy():
    for phases in (PrecisionSchedule(warmup=0.1), PrecisionSchedule(healing=0.1)):
        for ask in (lambda p: p.at(0), lambda p: p.describe(), lambda p: p.require_length()):
            with pytest.raises(ValueError, match=r"set_training_length\(config, iterations\)"):
                ask(phases)


@pytest.mark.parametrize("length", [0, -3, True, 2.0, "10"])
def test_a_length_that_is_none(length):
    with pytest.raises(ValueError, match="integer above 0"):
        PrecisionSchedule(0.1, 0.0, length)


def test_fp8_keeps_at_least_one_iteration():
    with pytest.raises(ValueError, match=r"warmup=0.6 and .*healing=0.3 leave none of 3 iterations"):
        PrecisionSchedule(0.6, 0.3, 3)
    with pytest.raises(ValueError, match="train longer"):
        PrecisionSchedule(0.1, 0.0, 1)

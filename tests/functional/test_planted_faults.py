"""Faults planted at random places of a training: telemetry finds them, a diagnosis ranks them, and advice cures them.

Clean trainings get no advice and no move of the guard. `make test-long` draws twenty faults and ten clean trainings.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.training_faults import OF_PRECISION, STEPS, Fault, Trial, applied, drawn, trial

SOME = (4, 6)  # one of precision, one of the model
DRAWS = [pytest.param(n, marks=() if n in SOME else pytest.mark.long) for n in range(20)]
CLEAN = [pytest.param(n, marks=() if n == 0 else pytest.mark.long) for n in range(10)]
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
NOTICE = "gradients lose a bit for nothing"
READS = {"input": ("fprop", "wgrad"), "grad_output": ("dgrad", "wgrad")}
IN_WORDS = {
    "nan": "FP8 is not the cause: it is bad in high precision too",
    "spikes": "FP8 is not the cause at this checkpoint",
    "learning rate": "in high precision the loss is bad too",
}


@pytest.mark.parametrize("number", DRAWS)
def test_a_planted_fault_is_found(ranks: Any, number: int) -> None:
    fault = drawn(number)

    def train(recipe: str | None, fields: dict[str, Any], seed: int = number, passes: int = 400) -> Trial:
        (seen,) = ranks(1).run(trial, fault, recipe, fields, seed, passes, timeout=200)
        return seen

    recipe = fault.fields["fp8_format"]
    own = {name: value for name, value in fault.fields.items() if name != "fp8_format"}
    ill = train(recipe, own)
    _of_codes(fault, ill) if fault.kind in OF_PRECISION else _of_the_model(fault, ill)
    if fault.kind not in OF_PRECISION:
        return

    # All sites together, both layers, and the first site of the worse one.
    cured = train(recipe, {**own, **applied(ill.advice)}, passes=56)
    assert [piece.title for piece in cured.advice if piece.title != NOTICE] == []
    found = cured.found
    assert found is not None
    assert fault.site not in [row["site"] for row in found["ranking"] if row["stands_out"]], found["verdict"]
    assert found["planned"]["distance"] < 1.6 * found["at_best"]["distance"]
    band = [train(None, {}, number + 1000 * other).loss for other in range(3)]
    assert abs(cured.loss - band[0]) < max(band) - min(band), (ill.loss, cured.loss, band)


def _of_codes(fault: Fault, ill: Trial) -> None:
    """Advice names the site, the tensor and the first iteration; a diagnosis has it first."""
    pieces = [piece for piece in ill.advice if piece.title != NOTICE]
    # The worst site comes first; what a saturated layer feeds may saturate in its turn.
    assert {(piece.sites[0], piece.tensor) for piece in pieces} == {(fault.site, fault.role)}, pieces
    first = min(piece.iterations[0] for piece in pieces)
    if fault.kind == "outlier":
        earliest, latest = (
            min((iteration for iteration, lost in ill.lost.items() if lost[which] > 5.0), default=STEPS)
            for which in (1, 0)
        )
        assert earliest <= first <= latest, (first, ill.lost)
    else:  # what is remembered saturates when it comes, and is harmful from the next iteration on
        assert first == fault.start + (fault.kind == "remembered")
    if fault.kind in ("remembered", "outgrown"):
        assert ill.first_bad[fault.site, "input", "saturation"] == fault.start
    assert ill.found is not None
    worst = ill.found["ranking"][0]
    assert (worst["site"], worst["stands_out"]) == (fault.site, True), ill.found["verdict"]
    assert worst["role"] in (None, fault.role) and worst["gemm"] in (None, *READS[fault.role]), worst
    assert {key.partition(":")[0] for key in ill.found["overrides"]} == {fault.site}


def _of_the_model(fault: Fault, ill: Trial) -> None:
    """High precision has it too, and that is said."""
    assert ill.found is not None
    assert IN_WORDS[fault.kind] in ill.found["verdict"], ill.found["verdict"]
    assert ill.found["overrides"] == {}, ill.found["verdict"]
    told = ill.advice[0]
    if fault.kind == "nan":
        assert ill.first_bad[fault.site, "weight", "non-finite"] == fault.start
        assert told.title == "not finite" and (told.sites, told.tensor) == ((fault.site,), "weight")
        assert told.iterations == (fault.start, fault.start)
    else:
        assert "--optimizer.lr=LOWER" in told.line and "FP8" in told.cause, told
        # A learning rate's first step is felt in the next iteration, beyond the loss's noise at times one later.
        wanted = {fault.start + 1, fault.start + 2} if fault.kind == "learning rate" else {fault.start}
        assert told.iterations[0] in wanted


@pytest.mark.parametrize("seed", CLEAN)
def test_a_clean_training_gets_no_advice_and_is_left_alone(ranks: Any, seed: int) -> None:
    recipe = RECIPES[seed % len(RECIPES)]
    (seen,) = ranks(1).run(trial, None, recipe, {"fp8_guard": True}, seed, 0, timeout=200)
    assert [piece.title for piece in seen.advice] == ([NOTICE] if recipe == "mxfp8" else [])
    assert seen.moves == [] and seen.first_bad == {}
    assert seen.losses[-1] < seen.losses[0] - 0.2 and len(seen.records) > 0

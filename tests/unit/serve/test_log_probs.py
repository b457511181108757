"""Differences of log-probabilities, by hand; differences that become an exit code."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_fp8.mcore.routing_replay import count_changed_choices
from megatron_fp8.serve.log_probs import _Measured, check_size
from megatron_fp8.serve.parity import Numbers, Parity, Part

OURS = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], dtype=torch.float64)
THEIRS = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]], dtype=torch.float64)
TARGETS = torch.tensor([1, 2])


def test_measures_by_hand():
    found = _Measured()
    found.add(OURS.log(), THEIRS.log(), TARGETS)
    differences = [math.log(2), math.log(0.5 / 0.6)]
    assert found.difference == pytest.approx(sum(differences))
    assert found.absolute == pytest.approx(sum(map(abs, differences)))
    assert found.largest == pytest.approx(math.log(2))
    kl = float((THEIRS * (THEIRS / OURS).log()).sum())
    assert found.kl == pytest.approx(kl)
    # k3 = r - 1 - log r, r = training / engine
    assert found.k3 == pytest.approx((0.5 - 1 + math.log(2)) + (1.2 - 1 - math.log(1.2)))
    assert found.ratio == pytest.approx(2 + 1.2)
    assert found.not_finite == 0 and found.engine == [THEIRS.log()[[0, 1], TARGETS].tolist()]


def test_nan_is_counted_and_spreads():
    theirs = THEIRS.log()
    theirs[0, 0] = torch.nan  # not at a target
    found = _Measured()
    found.add(OURS.log(), theirs, TARGETS)
    assert found.not_finite == 1 and math.isnan(found.kl) and math.isfinite(found.k3)


def numbers(kl: float, k3: float, not_finite: dict[str, int] | None = None) -> Numbers:
    whole = Part("whole", kl, k3, 0.0, 0.0)
    parts = [Part("config", 0.0, 0.0, 0.0, 0.0), Part("weight cast", kl, k3, 0.0, 0.0)]
    return Numbers(10, parts, whole, 0.0, 1.0, 0, 0, not_finite or {}, [], [], [])


@pytest.mark.parametrize(
    ("kl", "k3", "differ"),
    [(1e-4, 1e-4, 0), (1e-3, 0.0, 0), (2e-3, 0.0, 1), (0.0, 2e-3, 1), (math.nan, 0.0, 1), (0.0, math.inf, 1)],
)
def test_a_bound_that_is_not_kept_is_a_difference(kl, k3, differ):
    found = Parity("vllm", "fp8-channel")
    found.add_numbers(numbers(kl, k3), 1e-3)
    assert [each.name for each in found.remaining([])] == ["weight cast"] * differ
    assert not found.remaining(["numbers:weight*"])


def test_nan_in_training_alone_is_a_difference_and_json_has_texts():
    found = Parity("vllm", "fp8-channel")
    found.add_numbers(numbers(math.nan, 0.0, {"training": 3}), 1.0)
    left = found.remaining(["numbers"])
    assert [(each.kind, each.name, each.engine) for each in left] == [("NaN or Inf", "training", "3 tokens")]
    assert found.as_dict()["numbers"]["whole"]["kl"] == "NaN"


def test_flips_are_sets_of_experts_that_differ():
    ours = [torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.tensor([[0, 1], [2, 3], [1, 0]])]
    theirs = [torch.tensor([[1, 0], [2, 3], [1, 2]]), torch.tensor([[0, 1], [0, 3], [3, 0]])]
    assert count_changed_choices(ours, theirs) == 3


def test_too_many_log_probabilities_are_refused():
    check_size(2048, 128 * 1024)
    with pytest.raises(ValueError, match=r"--tokens=2049 with a vocabulary of 131,072 .* give 2048 at most"):
        check_size(2049, 128 * 1024)

"""A loss that rose: by much at once, by little for good, and never by noise. A weight that outgrows the others."""

import numpy as np
import pytest

from megatron_fp8.diagnosis.training_faults import WeightGrowth, find_growth, find_loss_rise


def lines(losses):
    return [{"iteration": i, "lm_loss": loss} for i, loss in enumerate(losses, start=1)]


FALLS = [5.0 - i / 30 + (-1) ** i / 50 for i in range(12)]


@pytest.mark.parametrize(
    ("after", "iteration", "by_little"),
    [
        ([8.0, 9.0, 9.5], 13, False),
        ([8.0], 13, False),  # the last one
        ([8.0, 4.6, 4.5], None, False),  # one wild batch
        ([5.4, 5.5, 5.3, 5.6], 13, True),
        ([4.5, 5.4, 5.5, 5.3], 14, True),
        ([5.4, 5.5], None, False),  # not yet for good
        ([5.4, 5.5, 5.3, 5.0, 4.5, 4.2], None, False),  # it came down again
        ([8.0, 9.0, 9.5, 5.0, 4.0], 13, False),
        ([4.7, 4.7, 4.7, 4.7], None, False),  # within the noise
        ([float("nan"), None, 8.0, 9.0, 9.5], 15, False),
    ],
)
def test_a_rise(after, iteration, by_little):
    found = find_loss_rise(lines(FALLS + after))
    if iteration is None:
        assert found is None
        return
    assert (found.iteration, found.noise is not None) == (iteration, by_little)
    assert found.loss == (FALLS + after)[iteration - 1] and found.before == pytest.approx(FALLS[-1], abs=0.1)


def test_a_training_that_is_ruined_at_once():
    assert find_loss_rise(lines([5.0, 9.0, 12.0, 13.0])).iteration == 2
    assert (
        find_loss_rise([]) is None
        and find_loss_rise(lines([5.0])) is None
        and find_loss_rise(lines([None])) is None
    )


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_noise_is_no_rise(noise):
    """Long trainings that have settled, batches that are wild now and then: the lowest loss is no yardstick."""
    draw = np.random.default_rng(0)
    for _ in range(2):
        losses = 2.5 + 3 * np.exp(-np.arange(3000) / 500) + noise * draw.standard_normal(3000)
        losses[70:2900:70] *= 0.5
        losses[50:2900:90] *= 2
        assert find_loss_rise(lines(losses.tolist())) is None


def norms(**last):
    """Norms of four layers' fc1, which grow from 6 to 12, and of fc2, from 1 to 9."""
    every = {f"layers.{layer}.fc1": {5: 6.0, 10: 9.0, 15: 12.0} for layer in range(4)}
    every |= {f"layers.{layer}.fc2": {5: 1.0, 10: 5.0, 15: 9.0} for layer in range(4)}
    every["layers.1.fc1"] |= {int(name[1:]): norm for name, norm in last.items()}
    return every


def test_a_weight_that_grows_more_than_in_other_layers():
    assert find_growth({}) == find_growth(norms()) == find_growth(norms(i15=35.0)) == []
    assert find_growth(norms(i10=30.0, i15=48.0)) == [WeightGrowth("layers.1.fc1", 10, 15, 8.0, 2.0)]
    assert find_growth(norms(i5=0.0, i15=48.0)) == []  # an adapter's zeros
    two = {name: seen for name, seen in norms(i15=480.0).items() if "fc1" in name and name < "layers.2"}
    assert find_growth(two) == []  # which of two would be the odd one?

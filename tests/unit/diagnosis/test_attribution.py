"""When a distance is beyond that of rounding alone."""

import pytest

from megatron_fp8.diagnosis.attribution import beyond_rounding
from megatron_fp8.diagnosis.measurements import BatchValues


@pytest.mark.parametrize(
    ("ratios", "beyond"),
    [
        ([1.77, 1.82, 1.85, 1.81], True),  # by little, in all alike
        # by much, in some more than in others: an outlier of 2^19 under blocks of 32
        ([7.9, 7.0, 4.2, 15.2], True),
        ([1.1, 1.0, 1.0, 15.0], False),  # once
        ([1.44, 1.5, 1.3, 1.64], False),
        ([2.0, 7.0, 4.2, 15.2], False),  # mostly, and not by as much in every batch: more batches tell
        ([1.0, 0.9, 1.1, 1.0], False),
    ],
)
def test_beyond_rounding(ratios, beyond):
    rounded = [0.02, 0.03, 0.025, 0.02]
    distances = [ratio * r for ratio, r in zip(ratios, rounded, strict=True)]
    assert beyond_rounding(BatchValues(tuple(distances)), BatchValues(tuple(rounded)), 1.6) is beyond


def test_no_distance_at_all_is_not_beyond():
    zero = BatchValues((0.0,) * 4)
    assert not beyond_rounding(zero, zero, 1.6)
    assert beyond_rounding(BatchValues((1e-3,) * 4), zero, 1.6)

"""Where two runs' telemetry parts."""

import copy
import math

import pytest

from megatron_fp8.diagnosis.run_comparison import (
    first_divergence,
    largest_of_weights,
    relative_difference,
)

SITES = ("layers.0.fc1", "layers.0.fc2", "layers.1.fc1")
TENSORS = ("input", "weight", "grad_output", "output", "dgrad", "wgrad")


def _records():
    return [
        {"iteration": iteration, "site": site, "tensor": tensor, "l2_norm": 2.0, "mean": 0.5, "mse": None}
        for iteration in (1, 2, 3)
        for site in SITES
        for tensor in TENSORS
    ]


def _changed(*where, value=2.5, statistic="l2_norm"):
    records = copy.deepcopy(_records())
    for record in records:
        if (record["iteration"], record["site"], record["tensor"]) in where:
            record[statistic] = value
    return records


def test_the_first_iteration_counts_and_in_it_forward_before_backward():
    other = _changed(
        (3, "layers.0.fc1", "input"), (2, "layers.1.fc1", "output"), (2, "layers.0.fc1", "wgrad")
    )
    found = first_divergence(_records(), other, 0.0)
    assert (found.iteration, found.site, found.tensor) == (2, "layers.1.fc1", "output")
    assert found.values == (2.0, 2.5) and found.relative == pytest.approx(0.2)


def test_gradients_part_from_the_end_on():
    other = _changed(
        (2, "layers.0.fc1", "grad_output"), (2, "layers.1.fc1", "dgrad"), (2, "layers.0.fc2", "dgrad")
    )
    found = first_divergence(_records(), other, 0.0)
    assert (found.site, found.tensor) == ("layers.1.fc1", "dgrad")


ATTENTION = [f"decoder.layers.0.self_attention.{name}" for name in ("linear_proj", "linear_qkv")]


def _attention(*different):
    sites = [*ATTENTION, "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"]
    return [
        {
            "iteration": 1,
            "site": site,
            "tensor": tensor,
            "l2_norm": 3.0 if (site, tensor) in different else 2.0,
        }
        for site in sites
        for tensor in TENSORS
    ]


def test_attention_s_projection_comes_after_what_it_reads_though_it_is_made_first():
    projection, qkv = ATTENTION
    fc1 = "decoder.layers.0.mlp.linear_fc1"
    forward = _attention((projection, "input"), (qkv, "output"), (fc1, "input"))
    found = first_divergence(_attention(), forward, 0.0)
    assert (found.site, found.tensor) == (qkv, "output")
    later = first_divergence(_attention(), _attention((projection, "output"), (fc1, "input")), 0.0)
    assert (later.site, later.tensor) == (projection, "output")
    backward = first_divergence(_attention(), _attention((projection, "wgrad"), (qkv, "grad_output")), 0.0)
    assert (backward.site, backward.tensor) == (projection, "wgrad")


def test_what_is_within_the_tolerance_is_passed_over():
    other = _changed((1, "layers.0.fc1", "input"), value=2.02)
    assert first_divergence(_records(), other, 0.05) is None
    assert first_divergence(_records(), other, 0.0).iteration == 1


@pytest.mark.parametrize(
    ("statistic", "both", "small", "large"),
    [
        ("mean", (0.001, {"std": 1.0}), -0.02, 0.2),  # of zero on average: any factor
        ("min", (-0.01, {"cur_amax": 2.0}), -0.05, -0.5),
        ("underflows%", (0.0, {}), 0.2, 20.0),
        ("dynamic_range", (12.0, {}), 20.0, None),  # one tiny value
        ("underflows%", (None, {}), None, 20.0),  # of no values
        ("mean", (None, {"std": 1.0}), None, 0.2),
    ],
)
def test_noise_is_no_large_difference(statistic, both, small, large):
    value, more = both
    ours = [record | {statistic: value} | more for record in _records()]
    for other, found in ((small, False), (large, large is not None)):
        theirs = copy.deepcopy(ours)
        theirs[0][statistic] = value if other is None else other
        assert bool(first_divergence(ours, theirs, 0.05)) == found
        assert bool(first_divergence(ours, theirs, 0.0)) == (other is not None)


def test_the_weight_that_differs_most_is_no_first_in_order():
    """Everything differs a little; one layer's weight grew, and another's later even more."""
    ours = [record | {"l2_norm": 2.0 + index / 100} for index, record in enumerate(_records())]
    assert largest_of_weights(ours, _records(), 0.5) is None
    other = copy.deepcopy(ours)
    for record in other:
        record["l2_norm"] *= 3.0 if record["tensor"] == "input" else 1.01
        if record["tensor"] == "weight" and record["iteration"] > 1:
            record["l2_norm"] *= {"layers.0.fc2": 1.5, "layers.0.fc1": 1.1}.get(record["site"], 1.0)
        if (record["iteration"], record["site"]) == (3, "layers.1.fc1"):
            record["l2_norm"] = None if record["tensor"] == "weight" else 900.0
    found = largest_of_weights(ours, other, 0.05)
    assert (found.iteration, found.site, found.tensor) == (2, "layers.0.fc2", "weight")
    assert found.relative == pytest.approx(1 - 1 / 1.515)


def test_a_value_that_is_no_number_differs_from_one_that_is():
    assert (
        first_divergence(_records(), _changed((2, "layers.0.fc1", "input"), value=None), 0.05).relative
        == math.inf
    )
    assert relative_difference(None, None) == 0.0 and relative_difference(0.0, 0.0) == 0.0


def test_runs_without_a_common_measurement_are_refused():
    with pytest.raises(ValueError, match="no iteration, site and tensor in common"):
        first_divergence(_records(), [record | {"iteration": 9} for record in _records()], 0.0)

"""Counts of several states are one iteration's."""

from dataclasses import astuple, fields

from megatron_fp8.state.iteration import IterationCounts


def test_every_field_is_added():
    count = len(fields(IterationCounts))
    total, other = IterationCounts(*range(count)), IterationCounts(*range(10, 10 + count))
    total.add(other)
    assert astuple(total) == tuple(range(10, 10 + 2 * count, 2)) and astuple(other)[0] == 10

"""What ranks ask each other: the same answers as if everybody had told everybody, and what it costs."""

import pytest
import torch.distributed as dist

from megatron_fp8.state.collectives import (
    any_on_ranks,
    broadcast_value,
    equal_on_ranks,
    first_rank_with,
    gather_to_first,
    sum_over_ranks,
    union,
)
from tests.support.fake_world import counted, simulated

SAYING = {"nobody": (), "the last alone": (3,), "several": (1, 2)}


def says(speakers, orders):
    rank = dist.get_rank()
    return first_rank_with(f"of {rank}" if rank in speakers else None, order=orders[rank])


@pytest.mark.parametrize("speakers", SAYING.values(), ids=SAYING)
def test_the_first_rank_that_has_something_to_say_is_heard_by_all(ranks, speakers):
    first = (speakers[0], f"of {speakers[0]}") if speakers else None
    assert ranks(4).run(says, speakers, [0] * 4) == [first] * 4


def test_a_lower_order_comes_before_a_lower_rank(ranks):
    assert ranks(4).run(says, (1, 2, 3), [0, 2, 1, 1]) == [(2, "of 2")] * 4


def in_a_group():
    groups = [dist.new_group(pair) for pair in ((0, 2), (1, 3))]
    rank = dist.get_rank()
    group = groups[rank % 2]
    return (
        first_rank_with(rank if rank > 1 else None, group),
        broadcast_value(1, rank, group),
        sum_over_ranks(rank, group),
    )


def test_ranks_are_those_of_the_group(ranks):
    assert ranks(4).run(in_a_group) == [((1, 2), 2, 2), ((1, 3), 3, 4)] * 2


def unites(parts):
    return list(union(parts[dist.get_rank()]).items())


def test_a_union_has_each_key_once_with_the_first_ranks_value(ranks):
    parts = [{"b": 0}, {"a": 1, "b": 1}, {}, {"c": 3, "a": 3}]
    assert ranks(4).run(unites, parts) == [[("b", 0), ("a", 1), ("c", 3)]] * 4


def collects():
    rank = dist.get_rank()
    return gather_to_first([f"{rank}.{i}" for i in range(rank % 3)])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_first_rank_has_everybodys_items_in_order(ranks, world):
    first, *others = ranks(world).run(collects)
    assert first == [(rank, f"{rank}.{i}") for rank in range(world) for i in range(rank % 3)]
    assert others == [[]] * (world - 1)


def compares(numbers):
    rank = dist.get_rank()
    return equal_on_ranks(numbers[rank]), any_on_ranks([rank == 2, False, True])


def test_numbers_are_the_same_or_not_and_flags_are_set_anywhere(ranks):
    assert ranks(3).run(compares, [[5, -(2**55)]] * 3) == [(True, [True, False, True])] * 3
    assert [same for same, _ in ranks(3).run(compares, [[5, 1], [5, 1], [5, 2]])] == [False] * 3


def test_alone_a_rank_answers_itself():
    assert (
        first_rank_with("x") == (0, "x") and first_rank_with(None) is None and broadcast_value(0, "x") == "x"
    )
    assert union({"a": 1}) == {"a": 1} and gather_to_first(["x", "y"]) == [(0, "x"), (0, "y")]
    assert any_on_ranks([True, False]) == [True, False] and equal_on_ranks([1]) and sum_over_ranks(3) == 3


def costs(world):
    """Bytes that the last rank of so many hands to collectives where nobody objects, and to the first rank."""
    with simulated(world - 1, world), counted() as found:
        assert first_rank_with(None) is None and any_on_ranks([False] * 100) == [False] * 100
        assert equal_on_ranks([1, 2])
        gather_to_first(["x" * 100])
    return {call: (one.calls, one.bytes) for call, one in found.items()}


def test_what_is_asked_costs_the_same_on_any_number_of_ranks():
    assert costs(512) == costs(16384)
    assert set(costs(512)) == {"all-reduce", "send"}

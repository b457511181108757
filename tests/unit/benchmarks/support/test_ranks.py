"""The rank pool itself: results, exceptions, deaths and timeouts come back, and the next case runs."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.support.ranks import RankError, RankPool, RankTimeout


class Unpicklable(Exception):
    def __init__(self, first: str, second: str):
        super().__init__(first)


def add_ranks(value: int) -> tuple[int, int]:
    total = torch.tensor(float(dist.get_rank() + value))
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("the reason")
    dist.all_reduce(torch.zeros(1))  # waits for the rank that failed


def fail_unpicklably() -> None:
    raise Unpicklable("the reason", "more")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.all_reduce(torch.zeros(1))


def hang_on(rank: int) -> None:
    while dist.get_rank() == rank:
        time.sleep(0.05)
    dist.all_reduce(torch.zeros(1))


def test_results_come_back_in_rank_order(ranks: RankPool) -> None:
    assert ranks(2).run(add_ranks, 5) == [(0, 11), (1, 11)]
    assert ranks(1).run(add_ranks, 5) == [(0, 5)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_failure_is_raised_with_its_traceback(ranks: RankPool, rank: int) -> None:
    with pytest.raises(KeyError, match="the reason") as caught:
        ranks(2).run(fail_on, rank)
    assert f"--- rank {rank} ---" in str(caught.value.__cause__) and "in fail_on" in str(
        caught.value.__cause__
    )
    assert ranks(2).run(add_ranks, 0) == [(0, 1), (1, 1)], "the same ranks run the next case"


def test_an_exception_that_does_not_pickle_is_told_as_text(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)--- rank 0 ---.*Unpicklable: the reason"):
        ranks(1).run(fail_unpicklably)


def test_deaths_and_hangs_are_told_and_the_ranks_replaced() -> None:
    pool = RankPool()
    try:
        with pytest.raises(RankError, match=r"rank 1 of die_on died\nexit code 7"):
            pool(2).run(die_on, 1)
        assert pool(2).run(add_ranks, 0) == [(0, 1), (1, 1)]
        for timeout in (3.0, 60.0):  # until both have begun, on a busy machine
            with pytest.raises(RankTimeout, match=f"hang_on ran past {timeout} s on 2 ranks") as caught:
                pool(2).run(hang_on, 1, timeout=timeout)
            if told := re.search(r"(?s)rank0.*all_reduce.*rank1.*in hang_on", str(caught.value)):
                break
        assert told, caught.value
        assert pool(2).run(add_ranks, 0) == [(0, 1), (1, 1)]
    finally:
        pool.close()

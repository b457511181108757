"""The arena on two ranks: one collective a group, the same scales everywhere, and no hang where ranks disagree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.support.ranks import RankPool
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.arena import Slot
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.collectives import recorded
from tests.support.slots import make_slots, observe


def collectives_of_an_iteration(
    count: int,
) -> tuple[list[tuple[str, int]], int, list[float], list[float], list]:
    """Rank r sees amax 10 * i + r in slot i, and r non-finite elements in slot 0; slot 1 is the other way round."""
    rank = dist.get_rank()
    state = Fp8State()
    recipe = DelayedScaling(amax_history_len=4)
    slots = make_slots(state.arena(dist.group.WORLD), recipe, [E4M3 if i % 2 else E5M2 for i in range(count)])
    for i, slot in enumerate(slots):
        observe(slot, 10.0 * i + (1 - rank if i == 1 else rank) + 1, nonfinite=rank if i == 0 else 0)
    state.finish_iteration()
    with recorded() as log:
        for i, slot in enumerate(slots):
            observe(slot, 10.0 * i + (1 - rank if i == 1 else rank) + 1, nonfinite=rank if i == 0 else 0)
        counts = state.finish_iteration()
    arena = state.arenas[0]
    sent = [(s.name, s.bytes) for s in log.sent]
    scales = [slot.scale.item() for slot in slots]
    return (sent, counts.amax_collectives, arena.last_amax.tolist(), scales, counts.nonfinite)


def test_one_collective_for_any_number_of_slots(ranks: RankPool):
    count = 500
    first, second = ranks(2).run(collectives_of_an_iteration, count)
    assert first == second, "all ranks have the same amaxes, counts and scales"
    sent, reported, amaxes, scales, nonfinite = first
    assert sent == [("all_reduce", 2 * 4 * count + 8)], "two float32 a slot, and two flags"
    assert reported == 1
    assert amaxes == [10.0 * i + 2 for i in range(count)]
    assert scales == [np.float32(448 if i % 2 else 57344) / np.float32(a) for i, a in enumerate(amaxes)]
    assert nonfinite == 1


def mismatched(kind: str) -> str:
    """Ranks disagree from the start, or once slots were added on one of them only."""
    rank = dist.get_rank()
    state = Fp8State()
    arena = state.arena(dist.group.WORLD)
    recipe = DelayedScaling()
    names = {
        "names": [["a", "b"], ["a", "c"]],
        "order": [["a", "b"], ["b", "a"]],
        "number": [["a", "b"], ["a"]],
        "none": [["a", "b"], []],
    }.get(kind, [["a", "b"], ["a", "b"]])[rank]
    for name in names:
        arena.add(recipe, E5M2 if kind == "format" and rank else E4M3).name = name
    if kind == "recipe" and rank:
        arena.add(None, E4M3)
    if kind == "later":
        state.finish_iteration()
        if rank == 1:
            arena.add(recipe, E4M3).name = "more"
    try:
        state.finish_iteration()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["names", "order", "number", "none", "format", "recipe", "later"])
def test_a_mismatch_is_an_error_on_every_rank(ranks: RankPool, kind: str):
    for message in ranks(2).run(mismatched, kind):
        assert "ranks of one amax group hold different FP8 tensors" in message
        assert "build the same layers" in message


def added_later() -> list[tuple[list[float], int]]:
    """(scales, amax collectives) of four iterations; slots come in the first and the third. Ranks see 1 and 2."""
    rank = dist.get_rank()
    state = Fp8State()
    arena = state.arena(dist.group.WORLD)
    slots: list[Slot] = []
    found = []
    for iteration, added in enumerate((1, 0, 2, 0)):
        slots += make_slots(arena, DelayedScaling(amax_compute_algo="most_recent"), [E4M3] * added)
        for i, slot in enumerate(slots):
            observe(slot, 2.0**iteration * (1 + (i + rank) % 2))
        collectives = state.finish_iteration().amax_collectives
        found.append(([slot.scale.item() for slot in slots], collectives))
    return found


def test_slots_added_on_all_ranks_are_reduced_from_then_on(ranks: RankPool):
    first, second = ranks(2).run(added_later)
    assert first == second == [([224], 1), ([112], 1), ([56] * 3, 2), ([28] * 3, 1)]


def collectives_of_two_groups() -> tuple[int, list[list[float]], int]:
    """World and a group of one: each arena is reduced over its own ranks. And how often the host read a tensor after."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    state = Fp8State()
    for group in (dist.group.WORLD, alone):
        observe(state.arena(group).add(None, E4M3), 1.0 + rank)
    counts = state.finish_iteration()
    amaxes = [arena.last_amax.tolist() for arena in state.arenas]
    with reads() as read:
        state.finish_iteration()
    return counts.amax_collectives, amaxes, len(read)


@contextmanager
def reads() -> Iterator[list[str]]:
    """What inside makes the host wait for a GPU: numbers read, one by one or as a list."""
    found: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default):
                found.append(str(func))
            return func(*args, **kwargs or {})

    as_list = torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch, Watch():
        patch.setattr(torch.Tensor, "tolist", lambda x: found.append("tolist") or as_list(x))
        yield found


def test_each_group_has_its_own_arena_and_all_are_read_at_once(ranks: RankPool):
    assert ranks(2).run(collectives_of_two_groups) == [(1, [[2], [1]], 1), (1, [[2], [2]], 1)]

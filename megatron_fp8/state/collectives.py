"""Small collectives among ranks, whose cost follows the result's size.

``all_gather_object`` sends every rank's object to every rank, padded to the longest: 16,384 ranks with 1 MB each
would need 16 GB on each of them. But replicas have equal objects, and mostly no rank has anything to report. So here
ranks first agree, by one number, which rank sends next; an item is sent once.

Everything here is collective over ``group`` (None: all ranks) and returns the same on every rank, unless documented
otherwise. Without torch.distributed, and in a group of one, nothing is sent.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..files.gc_pause import gc_paused

K = TypeVar("K")
V = TypeVar("V")
_NO_RANK = 2**62


def checked_group(group: Any) -> Any:
    """Returns a user's group. ValueError: it is neither None nor a process group of this rank."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return group
    raise ValueError(
        f"group={group!r} must be a process group of torch.distributed that this rank is in (of a DeviceMesh:"
        " mesh.get_group(name)), or None for all ranks"
    )


def first_rank_with(value: V | None, group: Any = None, *, order: int = 0) -> tuple[int, V] | None:
    """Returns (rank in the group, value) of the first rank with a value: lowest ``order``, then lowest rank; None if
    none has one.

    One all-reduce of 8 bytes, and a broadcast if there is a value.
    """
    ranks = size(group)
    if ranks == 1:
        return None if value is None else (0, value)
    best = _reduce([_NO_RANK if value is None else order * ranks + dist.get_rank(group)], "min", group)[0]
    if best == _NO_RANK:
        return None
    return best % ranks, broadcast_value(best % ranks, value, group)


def broadcast_value(rank: int, value: V | None, group: Any = None) -> V:
    """Returns the value of one rank of the group; the other ranks' arguments are ignored."""
    objects: list[Any] = [value]
    if size(group) > 1:
        dist.broadcast_object_list(
            objects, src=rank if group is None else dist.get_global_rank(group, rank), group=group
        )
    return objects[0]


def union(items: Mapping[K, V], group: Any = None) -> dict[K, V]:
    """Returns the items of all ranks, each key once with the value of the first rank that has it, in the order of ranks.

    Every item is sent once, by one rank; there are as many rounds as ranks with new items.
    """
    found: dict[K, V] = {}
    while True:
        new = {key: value for key, value in items.items() if key not in found}
        if (first := first_rank_with(new or None, group)) is None:
            return found
        found.update(first[1])


def any_on_ranks(flags: Sequence[bool], group: Any = None) -> list[bool]:
    """Returns for each flag whether any rank has it set; all pass equally many. One all-reduce, a byte a flag."""
    if size(group) == 1 or not flags:
        return list(flags)
    reduced = torch.tensor(list(flags), dtype=torch.uint8, device=device_of(group))
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in reduced.tolist()]


def sum_over_ranks(number: int, group: Any = None) -> int:
    """Returns the sum over the ranks."""
    return number if size(group) == 1 else _reduce([number], "sum", group)[0]


def max_over_ranks(numbers: Sequence[int], group: Any = None) -> list[int]:
    """Returns the element-wise maximum over the ranks; every rank passes equally many numbers. One all-reduce."""
    return list(numbers) if size(group) == 1 else _reduce(list(numbers), "max", group)


def equal_on_ranks(numbers: Sequence[int], group: Any = None) -> bool:
    """Whether all ranks pass equal numbers, equally many. One all-reduce: the largest, and the smallest negated."""
    if size(group) == 1:
        return True
    most = max_over_ranks([*numbers, *(-number for number in numbers)], group)
    return all(a == -b for a, b in zip(most[: len(numbers)], most[len(numbers) :], strict=True))


@gc_paused()
def gather_to_first(items: Sequence[V], group: Any = None) -> list[tuple[int, V]]:
    """Returns (rank, item) of all ranks' items in the order of ranks, on the group's first rank; an empty list on the
    others.

    For the content of one file: memory grows with the items and not with the ranks. Ranks send along a binomial tree:
    each sends its own and its children's items once, and the first receives from log2(ranks) others.
    """
    ranks = size(group)
    mine = [(0 if ranks == 1 else dist.get_rank(group), item) for item in items]
    if ranks == 1:
        return mine
    rank, step = dist.get_rank(group), 1
    while step < ranks:
        if rank & step:
            _send(mine, rank - step, group)
            return []
        if rank + step < ranks:
            mine += _receive(rank + step, group)
        step *= 2
    return mine


def size(group: Any) -> int:
    """Returns the number of ranks of the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def device_of(group: Any) -> torch.device:
    """Returns the device that this group's collectives need."""
    cuda = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def own_device() -> torch.device:
    """Returns this process's current GPU; the CPU if it sees none. The model, batches and reduced values are on it."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _reduce(numbers: list[int], how: str, group: Any) -> list[int]:
    reduced = torch.tensor(numbers, dtype=torch.int64, device=device_of(group))
    dist.all_reduce(reduced, op=getattr(dist.ReduceOp, how.upper()), group=group)
    return [int(number) for number in reduced.tolist()]


def _send(value: Any, rank: int, group: Any) -> None:
    content = torch.frombuffer(bytearray(pickle.dumps(value)) if value else bytearray(1), dtype=torch.uint8)
    length = torch.tensor([len(content) if value else 0], dtype=torch.int64, device=device_of(group))
    dist.send(length, group=group, group_dst=rank)
    if value:
        dist.send(content.to(device_of(group)), group=group, group_dst=rank)


def _receive(rank: int, group: Any) -> list[Any]:
    length = torch.zeros(1, dtype=torch.int64, device=device_of(group))
    dist.recv(length, group=group, group_src=rank)
    if not int(length):
        return []
    content = torch.zeros(int(length), dtype=torch.uint8, device=device_of(group))
    dist.recv(content, group=group, group_src=rank)
    return list(pickle.loads(content.cpu().numpy().tobytes()))

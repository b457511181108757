"""One rank of a world of any size, in this process: torch's fake process group, and a count of what is asked of it.

Collectives of the fake group return at once, with this rank's own values: sizes and calls are those of a real world, and
figures are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

LOSS = 16
"""Bytes of the all-reduce by which benchmarks/support/gpt.py sums up the losses of an iteration."""


@contextmanager
def simulated(rank: int, world: int) -> Iterator[None]:
    """Inside, this process is one rank of so many; groups of any backend are fake, and what is received is zero."""
    new_group = dist.new_group

    def new_fake(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    recv = dist.ProcessGroup.recv

    def receive(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        for tensor in tensors:
            tensor.detach().zero_()
        return recv(group, tensors, *args)

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "new_group", new_fake),
            mock.patch.object(dist.ProcessGroup, "recv", receive),
        ):
            yield
    finally:
        dist.destroy_process_group()


@dataclass
class Count:
    """Of one kind of collective: calls; bytes of whole tensors (of what a gather gives, and what others take);
    ``largest``, of one call; ``peers``, the most ranks that took part in one."""

    calls: int = 0
    bytes: int = 0
    largest: int = 0
    peers: int = 0


# Method of a process group -> collective, and the argument that is the whole tensor (or all of them). Newer torch calls
# some *_single that were *_base.
_WHOLE = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("all-reduce", 0)),
    **dict.fromkeys(("allgather", "_allgather_base", "all_gather_single"), ("all-gather", 0)),
    **dict.fromkeys(("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), ("all-gather", 0)),
    **dict.fromkeys(
        ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"), ("reduce-scatter", 1)
    ),
    **dict.fromkeys(
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), ("reduce-scatter", 1)
    ),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), ("all-to-all", 1)),
    "broadcast": ("broadcast", 0),
    "gather": ("gather", 0),
    "scatter": ("scatter", 1),
    "reduce": ("reduce", 0),
    "send": ("send", 0),
}


@contextmanager
def counted() -> Iterator[dict[str, Count]]:
    """Collective -> what is asked of groups of more than one rank inside; receiving is not counted beside sending, and
    tensors that one call takes together count as so many."""
    found: dict[str, Count] = {}

    def counting(name: str) -> Any:
        original = getattr(dist.ProcessGroup, name)
        call, whole = _WHOLE[name]

        def count(group: Any, *args: Any, **kwargs: Any) -> Any:
            value = args[whole]
            if group.size() > 1:
                one, size = found.setdefault(call, Count()), _bytes(value)
                one.calls += len(value) if name.endswith("_coalesced") else 1
                one.bytes += size
                one.largest, one.peers = max(one.largest, size), max(one.peers, group.size())
            return original(group, *args, **kwargs)

        return mock.patch.object(dist.ProcessGroup, name, count)

    with ExitStack() as stack:
        for name in filter(partial(hasattr, dist.ProcessGroup), _WHOLE):
            stack.enter_context(counting(name))
        yield found


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value))

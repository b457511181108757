"""A patch for loops that save the distributed optimizer as ``fully_reshardable``, which Megatron-Core can garble.

``train`` does not save so (optimizer/stored.py).

The weights of a bucket are followed by padding, so that each rank's shard has the same size. To be saved, a buffer's
buckets are joined without it, and then a weight is looked up by its place with it: from the second bucket on master
weights and moments are those of other weights, and the last ones zeros, wherever the buckets before have padding. There
are several buckets with overlap_grad_reduce, and with an embedding that two pipeline stages share; there is padding where
a bucket's weights are no multiple of 128 and of the number of data parallel ranks. Nothing is said but, for the last
weights, a warning. Here buckets are joined with their padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .patching import Patch


def patches() -> list[Patch]:
    """The function that gathers what a distributed optimizer saves."""
    return [
        Patch(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
            "sharded_param_state_fully_reshardable",
            joined_with_padding,
            "buckets are joined without their padding, and weights are looked up by their place with it",
            wrap=True,
        )
    ]


def joined_with_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """sharded_param_state_fully_reshardable, in which padding counts as what a bucket holds."""

    @functools.wraps(original)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _padding_held(self.buffers):
            return original(self, *args, **kwargs)

    return sharded_param_state


@contextmanager
def _padding_held(buffers: list[Any]) -> Iterator[None]:
    parts = [part for buffer in buffers for part in (buffer, *buffer.buckets)]
    unpadded = [part.numel_unpadded for part in parts]
    for part in parts:
        part.numel_unpadded = part.grad_data.numel()
    try:
        yield
    finally:
        for part, number in zip(parts, unpadded, strict=True):
            part.numel_unpadded = number

"""A patch for checkpoints of the distributed optimizer as ``fully_reshardable``, which Megatron-Core can corrupt.

``train`` does not save in that format (optimizer/sharded_state.py).

The weights of a bucket are followed by padding, so that each rank's shard has the same size. For a save,
Megatron-Core joins a buffer's buckets without the padding, but then looks up a weight by its position with the
padding. From the second bucket on, master weights and moments are those of other weights, and the last ones zeros, if
earlier buckets have padding. There are several buckets with overlap_grad_reduce, and with an embedding that two
pipeline stages share; there is padding if the size of a bucket's weights is no multiple of 128 and of the number of
data parallel ranks. The only sign is a warning for the last weights. Here buckets are joined with their padding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .patching import Patch


def patches() -> list[Patch]:
    """Returns the patch of the function that gathers a distributed optimizer's state for saving."""
    return [
        Patch(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
            "sharded_param_state_fully_reshardable",
            joined_with_padding,
            "buckets are joined without their padding, but weights are looked up by positions with it",
            wrap=True,
        )
    ]


def joined_with_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps sharded_param_state_fully_reshardable: buckets keep their padding."""

    @functools.wraps(original)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _with_padding(self.buffers):
            return original(self, *args, **kwargs)

    return sharded_param_state


@contextmanager
def _with_padding(buffers: list[Any]) -> Iterator[None]:
    parts = [part for buffer in buffers for part in (buffer, *buffer.buckets)]
    unpadded = [part.numel_unpadded for part in parts]
    for part in parts:
        part.numel_unpadded = part.grad_data.numel()
    try:
        yield
    finally:
        for part, number in zip(parts, unpadded, strict=True):
            part.numel_unpadded = number

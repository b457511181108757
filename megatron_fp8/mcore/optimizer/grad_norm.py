"""The gradient norm, the same for any order of shards.

Megatron-Core sums squares in float32, shard by shard, in the order of its buffers. Buffers are made by dtype, so FP8
weights have a separate one, shards are split elsewhere, and the sum's last bits differ from the same training with
BF16 weights; clipping spreads the difference to every gradient. Summed in float64 and rounded once, the norm is the
same float32 number for any split (except for about one sum in 10^8, which is too close to a rounding boundary). Only
the distributed optimizer shards, and only FP8 moves weights to other buffers, so this norm is used only for FP8 models
with the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from ...state.collectives import own_device
from ..patches.patching import PatchList

patches = PatchList("megatron.core.optimizer")


@torch.no_grad()
def norm_on_device(grads: list[torch.Tensor], group: Any) -> torch.Tensor:
    """Returns the 2-norm of all gradients of all ranks of ``group`` as one vector: float32 [1]. Collective.

    NaN or Inf in any gradient makes it NaN or Inf. A rank may have no gradients.
    """
    squares = torch.zeros(1, dtype=torch.float64, device=own_device())
    for grad in grads:
        squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(torch.float32)


def norm_of_shards(original: Callable[[Any], Any], self: Any) -> Any:
    """The norm of an optimizer, or of chained ones in one group, if all of them shard FP8 models."""
    parts = getattr(self, "chained_optimizers", [self])
    if not all(isinstance(part, DistributedOptimizer) and trains_fp8(part) for part in parts):
        return original(self)
    if len(parts) > 1 and not self.grads_states_parallel_group_is_shared():
        return original(self)
    grads = [grad for part in parts for grad in part.get_main_grads_for_grad_norm()]
    return float(norm_on_device(grads, parts[0].get_grad_stats_parallel_group()))


for _owner in ("distrib_optimizer.DistributedOptimizer", "optimizer.ChainedOptimizer"):
    patches.wrap(
        f"{_owner}.get_grad_norm",
        "the norm of shards depends on the buffers' layout, and FP8 weights have a separate buffer",
    )(norm_of_shards)


def trains_fp8(optimizer: Any) -> bool:
    """Whether the models of a distributed optimizer have FP8 layers."""
    return bool(optimizer.model_chunks[0].config.fp8)

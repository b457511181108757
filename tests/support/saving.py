"""A state that ranks save together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def state(value: float) -> dict[str, Any]:
    """A vector of which every rank holds 1000 values."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    part = torch.arange(1000.0) + 1000 * dist.get_rank() + value
    return {"a": ShardedTensor.from_rank_offsets("a", part, (0, dist.get_rank(), dist.get_world_size()))}

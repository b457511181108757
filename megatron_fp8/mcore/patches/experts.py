"""Patches for experts with another layout over ranks, without expert parallelism.

Megatron-Core keeps an expert's weight apart from dense ones, in buffers that experts' own data parallel ranks reduce,
where expert parallelism is more than 1. With 1, and experts split over more or fewer tensor parallel ranks than dense
layers are, the ranks that share an expert's weight are others than a dense layer's too. Of TP=2 with ETP=1 each rank has
the gradient of its own tokens, and nobody adds them; of TP=1 with ETP=2 one rank's part of a weight is broadcast over the
other's. Both are silent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from .patching import Patch


def patches() -> list[Patch]:
    """Both linears that experts are made of."""
    return [
        Patch(
            f"megatron.core.tensor_parallel.layers.{kind}ParallelLinear",
            "__init__",
            reduced_by_experts_ranks,
            "experts' gradients are reduced over the dense layers' ranks where expert parallelism is 1",
            wrap=True,
        )
        for kind in ("Column", "Row")
    ]


def reduced_by_experts_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """__init__ of a linear; an expert's parameters are marked wherever experts have data parallel ranks of their own."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_expert and (
            parallel_state.get_expert_tensor_parallel_world_size()
            != parallel_state.get_tensor_model_parallel_world_size()
        ):
            for parameter in (self.weight, self.bias):
                if parameter is not None:
                    parameter.allreduce = False

    return __init__

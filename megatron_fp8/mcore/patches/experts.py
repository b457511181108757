"""Patches for experts with a different tensor parallel size, without expert parallelism.

With expert parallelism above 1 Megatron-Core holds experts' weights in separate buffers, which experts' own data
parallel ranks reduce. With 1, and experts split over more or fewer tensor parallel ranks than dense layers, the ranks
that share an expert's weight also differ from a dense layer's. With TP=2 and ETP=1 each rank has the gradient of its
own tokens, and Megatron-Core does not sum them. With TP=1 and ETP=2 it broadcasts one rank's part of a weight over
the other's. Both are silent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from .patching import Patch


def patches() -> list[Patch]:
    """Returns the patches of both linears in experts."""
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
    """Wraps a linear's __init__: marks an expert's parameters if experts have their own data parallel ranks."""

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

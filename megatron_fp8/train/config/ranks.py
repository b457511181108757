"""Number of ranks for a layout, from a model section or a Megatron-Core config."""

from __future__ import annotations

import math
from typing import Any

AUTO = "auto"
"""Value of model.tensor_model_parallel_size if the number of ranks decides."""


def tensor_ranks(ranks: int, *sizes: int | None) -> int:
    """The largest tensor parallel size that divides the ranks and the model's heads, query groups and ffn size."""
    return math.gcd(ranks, *(size for size in sizes if size))


def dense_ranks(model: Any) -> int:
    """Number of ranks with one copy of the dense model, including context-parallel ranks."""
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
    )
    return math.prod(sizes)


def expert_tensor_ranks(model: Any) -> int:
    """Number of ranks that share an expert; by default as many as share a dense layer."""
    return int(model.expert_tensor_parallel_size or model.tensor_model_parallel_size)


def expert_ranks(model: Any) -> int:
    """Number of ranks with one copy of all experts; 1 without experts."""
    if not model.num_moe_experts:
        return 1
    sizes = (
        model.pipeline_model_parallel_size,
        model.expert_model_parallel_size,
        expert_tensor_ranks(model),
    )
    return math.prod(sizes)


def least_ranks(model: Any) -> int:
    """Least number of ranks for a layout; any multiple works."""
    return math.lcm(dense_ranks(model), expert_ranks(model))

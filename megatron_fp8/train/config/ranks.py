"""How many ranks a layout needs, of a model's section or a config of Megatron-Core. Without Megatron-Core."""

from __future__ import annotations

import math
from typing import Any

AUTO = "auto"
"""What model.tensor_model_parallel_size says where the number of ranks decides."""


def tensor_ranks(ranks: int, *sizes: int | None) -> int:
    """The largest tensor parallel size that divides the ranks and the model's heads, query groups and ffn size."""
    return math.gcd(ranks, *(size for size in sizes if size))


def dense_ranks(model: Any) -> int:
    """Ranks that hold one copy of the dense model, context parallel ones included."""
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
    )
    return math.prod(sizes)


def expert_tensor_ranks(model: Any) -> int:
    """Ranks that share an expert: unless it is said otherwise as many as share a dense layer."""
    return int(model.expert_tensor_parallel_size or model.tensor_model_parallel_size)


def expert_ranks(model: Any) -> int:
    """Ranks that hold one copy of all experts; 1 for a model without."""
    if not model.num_moe_experts:
        return 1
    sizes = (
        model.pipeline_model_parallel_size,
        model.expert_model_parallel_size,
        expert_tensor_ranks(model),
    )
    return math.prod(sizes)


def least_ranks(model: Any) -> int:
    """The ranks that a layout needs, of which any multiple will do."""
    return math.lcm(dense_ranks(model), expert_ranks(model))

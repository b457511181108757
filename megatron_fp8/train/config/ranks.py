"""Numbers of ranks for a layout, from a model section or a Megatron-Core config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sections import TrainSection

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


def check_layout(model: Any, train: TrainSection, world_size: int, variables: Sequence[str] = ()) -> int:
    """The data-parallel size of `world_size` ranks. Raises ValueError if the layout does not fit.

    ``variables``: as Launch.variables.
    """
    ranks = f"the world size {world_size}{''.join(f' ({variable})' for variable in variables[1:])}"
    sizes = {
        "tensor": model.tensor_model_parallel_size,
        "pipeline": model.pipeline_model_parallel_size,
        "context": model.context_parallel_size,
    }
    if world_size % (product := dense_ranks(model)):
        parts = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"{ranks} does not divide by {parts} = {product}: launch a multiple of "
            f"{product} processes, or change model.tensor_model_parallel_size, "
            "model.pipeline_model_parallel_size or model.context_parallel_size."
        )
    if world_size % (experts := expert_ranks(model)):
        raise ValueError(
            f"{ranks} does not divide by pipeline {sizes['pipeline']} x expert"
            f" {model.expert_model_parallel_size} x expert tensor"
            f" {expert_tensor_ranks(model)} = {experts}: launch a multiple of"
            f" {least_ranks(model)} processes, or change model.expert_model_parallel_size or"
            " model.expert_tensor_parallel_size."
        )
    data = world_size // product
    step = data * train.micro_batch_size
    if train.global_batch_size % step:
        raise ValueError(
            f"train.global_batch_size={train.global_batch_size} does not divide by train.micro_batch_size="
            f"{train.micro_batch_size} x {data} data-parallel ranks = {step}: give a multiple of {step}."
        )
    _check_interleaving(model, train.global_batch_size // step)
    _check_experts(model)
    tokens, cuts = train.seq_length, 2 * sizes["context"] if sizes["context"] > 1 else 1
    if tokens % cuts or (model.sequence_parallel and (tokens // sizes["context"]) % sizes["tensor"]):
        raise ValueError(
            f"train.seq_length={tokens} does not divide among the ranks (context parallel "
            f"{sizes['context']}, tensor parallel {sizes['tensor']} with "
            f"sequence_parallel={model.sequence_parallel}): give a multiple of {cuts * sizes['tensor']}."
        )
    return data


def _check_interleaving(model: Any, microbatches: int) -> None:
    """ValueError if interleaved stages cannot divide the micro-batches; Megatron-Core checks at the first iteration."""
    stages = model.pipeline_model_parallel_size
    if (model.virtual_pipeline_model_parallel_size or 1) == 1 or stages == 1:
        return
    group = model.microbatch_group_size_per_vp_stage or stages
    if not stages <= group <= microbatches or 0 < microbatches % group < stages:
        raise ValueError(
            f"train.global_batch_size gives {microbatches} micro-batches a data-parallel rank, and interleaved stages"
            f" take them {group} at a time (model.microbatch_group_size_per_vp_stage, by default the"
            f" {stages} pipeline stages, and no fewer): give a multiple of {group} micro-batches, by a larger"
            " train.global_batch_size or a smaller train.micro_batch_size."
        )


def _check_experts(model: Any) -> None:
    """ValueError if experts would gather tokens in parts of different sizes, which gloo does not support."""
    import torch

    tensor = expert_tensor_ranks(model)
    both = model.num_moe_experts and tensor > 1 and model.expert_model_parallel_size > 1
    if both and model.moe_token_dispatcher_type != "allgather" and not torch.cuda.is_available():
        raise ValueError(
            f"model.expert_model_parallel_size={model.expert_model_parallel_size} with expert tensor parallelism {tensor}"
            f" and model.moe_token_dispatcher_type={model.moe_token_dispatcher_type!r} gathers parts of different sizes,"
            " which gloo, the backend of CPUs, cannot: set model.expert_tensor_parallel_size=1, or"
            " model.moe_token_dispatcher_type=allgather."
        )

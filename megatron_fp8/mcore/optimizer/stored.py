"""The distributed optimizer's state on this rank, as boxes of whole tensors.

The distributed optimizer cuts masters and moments by number: a rank holds a run of a weight's elements, from ``start`` to
``end``, wherever rows end. A checkpoint knows parts of tensors as boxes, by offset and shape. A run is made of few of
them; in a matrix, of the end of a row, of whole rows, and of the beginning of a row:

    . . . a a
    b b b b b
    b b b b b
    c c . . .

So each rank writes what it holds, from where it lies, and reads what it will hold. Nothing is sent, no rank has all of
a weight, and files hold named tensors in the whole model's shapes, which any layout reads.

Rejected: Megatron-Core's three ways. ``fully_reshardable`` gathers 12 bytes a parameter of a rank's part of the model in
the memory of one rank of each data-parallel group, and reads as much on all of them. ``dp_reshardable`` stores buckets in
the place of named tensors: another tensor or pipeline layout, another recipe, could not read it. This takes the place of
``fully_sharded_model_space``, which stored runs as they are, and which 0.16's own tensors refuse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from ...params.coded import CodedTensor
from ..patches.patching import Patch

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Boxes that together are elements ``start`` to ``end`` of a tensor laid out by rows, in their order.

    Each is contiguous. There are at most 2 * dimensions - 1 of them; none of an empty run.
    """
    if start == end:
        return []
    if len(shape) < 2:
        return [((start,), (end - start,)) if shape else ((), ())]
    row = prod(shape[1:])

    def within(number: int, low: int, high: int) -> list[Box]:
        inner = boxes(shape[1:], low - number * row, high - number * row)
        return [((number, *offset), (1, *size)) for offset, size in inner]

    low, high = -(-start // row), end // row  # whole rows
    if low > high:
        return within(high, start, end)
    whole = [((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))] if low < high else []
    return [*within(low - 1, start, low * row), *whole, *within(high, high * row, end)]


def sharded_state(
    self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    """DistributedOptimizer.sharded_param_state_fs_model_space: by number of the parameter, what this rank holds of
    ``param`` (the master), ``exp_avg`` and ``exp_avg_sq``.

    To be saved, boxes are views of the live state; to be loaded, of new tensors on the CPU.
    """
    found: dict[int, dict[str, list[ShardedTensor]]] = {}
    for param, shard, start, end in _runs(self, model_sharded_state_dict):
        parts = {}
        for name, value in held(self, param).items():
            if is_loading:
                value = torch.empty(end - start, dtype=value.dtype, device="cpu")
            key = f"optimizer.state.{name}.{shard.key}"
            parts[name] = cut(shard, key, value, start, replica=self.distributed_optimizer_instance_id)
        found[len(found)] = parts
    return found


def own_weights(optimizer: Any, model: dict[str, Any]) -> list[ShardedTensor]:
    """What this rank holds of its weights, made from the masters by rounding.

    Args:
        optimizer: Megatron-Core's distributed optimizer.
        model: the chunks' sharded state, over live parameters.
    """
    found: list[ShardedTensor] = []
    for param, shard, start, _ in _runs(optimizer, model):
        master = held(optimizer, param)["param"]
        value = master.to(shard.data.dtype)
        found += cut(shard, shard.key, value, start, replica=optimizer.distributed_optimizer_instance_id)
    return found


def joined(original: Callable[..., Any]) -> Callable[..., Any]:
    """DistributedOptimizer.load_parameter_state_from_fs_model_space, which takes what the boxes were filled with."""

    @functools.wraps(original)
    def load(self: Any, state_dict: dict[int, dict[str, list[torch.Tensor]]]) -> Any:
        return original(
            self,
            {
                number: {name: torch.cat([box.reshape(-1) for box in boxed]) for name, boxed in state.items()}
                for number, state in state_dict.items()
            },
        )

    return load


def patches() -> list[Patch]:
    """The two functions of Megatron-Core's that store a distributed optimizer in the model's shapes."""
    why = "it stores runs of a weight's elements, which Megatron-Core's own sharded tensors refuse"
    optimizer = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"
    return [
        Patch(optimizer, "sharded_param_state_fs_model_space", sharded_state, why),
        Patch(optimizer, "load_parameter_state_from_fs_model_space", joined, why, wrap=True),
    ]


def _runs(optimizer: Any, model: Any) -> Iterator[tuple[torch.nn.Parameter, Any, int, int]]:
    """Parameters of which this rank holds some, in the order in which Megatron-Core loads them: the parameter, the
    sharded tensor or factory of its weight, and the run."""
    sharded, _ = extract_sharded_tensors_and_factories(model)
    places = {id(shard.data): shard for shard in nested_values(sharded)}
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for param, ranges in bucket["param_map"].items():
                    assert id(param) in places, (
                        f"a parameter {tuple(param.shape)} has no place in the model's state"
                    )
                    yield param, places[id(param)], ranges["param"].start, ranges["param"].end


def held(optimizer: Any, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """By name what this rank holds of a parameter's master and moments, each of one dimension, in the run's order.

    Raises ValueError: the master is what a BF16 weight leaves of it, which is no number by itself.
    """
    if getattr(optimizer.config, "store_param_remainders", False) and (
        optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and optimizer.config.bf16
    ):
        raise ValueError(
            "OptimizerConfig.store_param_remainders=True keeps 16 bits of each master beside its weight's 16: such a"
            " master cannot be stored. Set store_param_remainders=False."
        )
    return {
        name: value.dequantize().cpu() if isinstance(value, CodedTensor) else value.detach()
        for name, value in optimizer._get_main_param_and_optimizer_states(param).items()
        if name != "step"  # a number, which all parameters share
    }


def cut(shard: Any, key: str, value: torch.Tensor, start: int, *, replica: int) -> list[ShardedTensor]:
    """``value`` as boxes of the tensors that ``shard`` stands for, under ``key``; in the order of its elements.

    Args:
        shard: of the whole parameter of this rank. A factory makes several: of a gated MLP's projection two.
        value: elements from number ``start`` on of the parameter laid out flat.
        replica: 0 for the one of those who hold the same that writes it. Data-parallel ranks hold parts of their own.
    """
    whole = torch.empty(shard.data.shape, dtype=value.dtype, device="meta")
    replicas = (*shard.replica_id[:-1], replica)
    if isinstance(shard, ShardedTensorFactory):
        made = list(nested_values(replace(shard, key=key, data=whole, replica_id=replicas).build()))
    else:
        made = [replace(shard, key=key, data=whole, dtype=whole.dtype, replica_id=replicas)]
    found, end = [], start + value.numel()
    for part in sorted(made, key=lambda part: part.data.storage_offset()):
        assert part.data.is_contiguous(), f"{part.key} is no run of its parameter's elements"
        first = part.data.storage_offset()
        low, high = max(start, first), min(end, first + part.data.numel())
        at = low - start
        for offset, size in boxes(tuple(part.data.shape), low - first, max(high, low) - first):
            found.append(_box(part, offset, size, value[at : at + prod(size)]))
            at += prod(size)
    assert sum(box.data.numel() for box in found) == value.numel(), f"{key} is not all that its parts are"
    return found


def _box(
    part: ShardedTensor, offset: tuple[int, ...], size: tuple[int, ...], data: torch.Tensor
) -> ShardedTensor:
    """A box of ``part``, whose axes that the parameter has not are of size one."""
    added = part.prepend_axis_num
    shape = (*(1 for _ in range(added)), *size)
    within = (*(0 for _ in range(added)), *offset)
    return ShardedTensor(
        part.key,
        data.view(shape),
        data.dtype,
        shape,
        part.global_shape,
        tuple(whole + own for whole, own in zip(part.global_offset, within, strict=True)),
        None,  # boxes make no regular grid
        part.replica_id,
    )

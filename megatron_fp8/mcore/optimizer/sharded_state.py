"""The distributed optimizer's state on this rank, as boxes of whole tensors.

The distributed optimizer splits masters and moments by element number: a rank holds a range of a weight's elements,
from ``start`` to ``end``, wherever rows end. A checkpoint has parts of tensors as boxes, by offset and shape. A range
consists of few boxes; in a matrix, of the end of a row, of whole rows, and of the start of a row:

    . . . a a
    b b b b b
    b b b b b
    c c . . .

So each rank writes its own range and reads its own range. Nothing is sent, no rank has all of a weight, and files
hold named tensors in the whole model's shapes, which any layout can load.

Rejected: Megatron-Core's three formats. ``fully_reshardable`` gathers 12 bytes a parameter of a rank's part of the model
in the memory of one rank of each data-parallel group, and reads as much on all of them. ``dp_reshardable`` stores
buckets in place of named tensors: another tensor or pipeline layout, or another recipe, could not load it. This replaces
``fully_sharded_model_space``, which stored ranges without splitting them, and which 0.16's own tensors refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from ...params.fp8_tensor_base import Fp8TensorBase
from ..patches.patching import PatchList

patches = PatchList("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer")
_WHY = "it stores ranges of a weight's elements, which Megatron-Core's own sharded tensors refuse"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Returns the boxes of elements ``start`` to ``end`` of a row-major tensor, in order.

    Each is contiguous. There are at most 2 * dimensions - 1 of them; none for an empty range.
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
    """Replaces DistributedOptimizer.sharded_param_state_fs_model_space.

    Returns parameter number -> this rank's boxes of ``param`` (the master), ``exp_avg`` and ``exp_avg_sq``. For
    saving, boxes are views of the live state; for loading, of new tensors on the CPU.
    """
    found: dict[int, dict[str, list[ShardedTensor]]] = {}
    for param, shard, start, end in _ranges(self, model_sharded_state_dict):
        parts = {}
        for name, value in rank_state(self, param).items():
            if is_loading:
                value = torch.empty(end - start, dtype=value.dtype, device="cpu")
            key = f"optimizer.state.{name}.{shard.key}"
            parts[name] = split_into_boxes(
                shard, key, value, start, replica=self.distributed_optimizer_instance_id
            )
        found[len(found)] = parts
    return found


patches.replace("sharded_param_state_fs_model_space", sharded_state, _WHY)


def own_weights(optimizer: Any, model: dict[str, Any]) -> list[ShardedTensor]:
    """Returns this rank's part of its weights, rounded from the masters.

    Args:
        optimizer: Megatron-Core's distributed optimizer.
        model: the chunks' sharded state, over live parameters.
    """
    found: list[ShardedTensor] = []
    for param, shard, start, _ in _ranges(optimizer, model):
        master = rank_state(optimizer, param)["param"]
        value = master.to(shard.data.dtype)
        found += split_into_boxes(
            shard, shard.key, value, start, replica=optimizer.distributed_optimizer_instance_id
        )
    return found


@patches.wrap("load_parameter_state_from_fs_model_space", _WHY)
def load_joined(
    original: Callable[..., Any], self: Any, state_dict: dict[int, dict[str, list[torch.Tensor]]]
) -> Any:
    """Joins the loaded boxes."""
    return original(
        self,
        {
            number: {name: torch.cat([box.reshape(-1) for box in boxed]) for name, boxed in state.items()}
            for number, state in state_dict.items()
        },
    )


def _ranges(optimizer: Any, model: Any) -> Iterator[tuple[torch.nn.Parameter, Any, int, int]]:
    """Yields the parameters of which this rank holds elements, in the order in which Megatron-Core loads them: the
    parameter, the sharded tensor or factory of its weight, and the range."""
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


def rank_state(optimizer: Any, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """Returns this rank's part of a parameter's master and moments by name, each one-dimensional, in the range's order.

    Raises ValueError: the master stores only the bits that its BF16 weight lacks.
    """
    if getattr(optimizer.config, "store_param_remainders", False) and (
        optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 and optimizer.config.bf16
    ):
        raise ValueError(
            "OptimizerConfig.store_param_remainders=True keeps 16 bits of each master beside its weight's 16: such a"
            " master cannot be stored. Set store_param_remainders=False."
        )
    return {
        name: value.dequantize().cpu() if isinstance(value, Fp8TensorBase) else value.detach()
        for name, value in optimizer._get_main_param_and_optimizer_states(param).items()
        if name not in ("step", "master_param")  # shared by all parameters; an offloaded optimizer's own copy
    }


def split_into_boxes(
    shard: Any, key: str, value: torch.Tensor, start: int, *, replica: int
) -> list[ShardedTensor]:
    """Splits ``value`` into boxes of the tensors of ``shard``, under ``key``, in the order of its elements.

    Args:
        shard: of this rank's whole parameter. A factory makes several tensors: two for a gated MLP's projection.
        value: elements of the flattened parameter, from number ``start`` on.
        replica: 0 for the one holder that writes the value. Data-parallel ranks hold different parts.
    """
    whole = torch.empty(shard.data.shape, dtype=value.dtype, device="meta")
    replicas = (*shard.replica_id[:-1], replica)
    if isinstance(shard, ShardedTensorFactory):
        tensors = list(nested_values(replace(shard, key=key, data=whole, replica_id=replicas).build()))
    else:
        tensors = [replace(shard, key=key, data=whole, dtype=whole.dtype, replica_id=replicas)]
    found, end = [], start + value.numel()
    for part in sorted(tensors, key=lambda part: part.data.storage_offset()):
        assert part.data.is_contiguous(), f"{part.key} is no contiguous range of its parameter's elements"
        first = part.data.storage_offset()
        low, high = max(start, first), min(end, first + part.data.numel())
        at = low - start
        for offset, size in boxes(tuple(part.data.shape), low - first, max(high, low) - first):
            found.append(_box(part, offset, size, value[at : at + prod(size)]))
            at += prod(size)
    assert sum(box.data.numel() for box in found) == value.numel(), f"the parts of {key} do not cover it"
    return found


def _box(
    part: ShardedTensor, offset: tuple[int, ...], size: tuple[int, ...], data: torch.Tensor
) -> ShardedTensor:
    """Makes a box of ``part``; axes that the parameter does not have get size one."""
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

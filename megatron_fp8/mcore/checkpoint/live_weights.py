"""Live weights of a Megatron-Core model, as pieces of whole tensors.

Pieces have the names, places and values that a checkpoint of the same moment would have: FP8 weights are rounded from
their float32 masters. With the distributed optimizer each rank holds a part of an FP8 weight's master, and that part is
its piece. A piece's values are made when they are read, so nothing is held beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica

from ...params.fp8_parameter import Fp8Parameter
from ...state.arena import is_slot_key
from ..optimizer.sharded_state import split_into_boxes
from ..runtime import unwrap
from ..sites import prepare
from .training_state import model_state, tensors_of


@dataclass(frozen=True)
class Piece:
    """A box of a tensor of the whole model.

    Attributes:
        name: the tensor's, as in checkpoints.
        offset, shape: of the box, in the tensor.
        whole: the tensor's shape.
        dtype: the tensor's.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype


class LiveWeights:
    """This rank's pieces of a model's weights; replicas belong to the first rank that has one. Collective.

    Args:
        chunks: model chunks, in DistributedDataParallel and Float16Module or not.

    Raises ValueError: weights of the last step are still to be gathered through the gradient buffer.
    """

    def __init__(self, chunks: list[Any]) -> None:
        prepare(chunks)
        for chunk in chunks:
            _finish_gather(chunk)
        self._shards: dict[Piece, Any] = {}
        for flat in model_state(chunks).values():
            for shard in flat.values():
                if not is_slot_key(shard.key):
                    self._shards |= dict.fromkeys(_pieces(shard), shard)
        self.device = next(parameter.device for chunk in chunks for parameter in unwrap(chunk).parameters())

    def pieces(self) -> list[Piece]:
        """The pieces that this rank gives."""
        return list(self._shards)

    @torch.no_grad()
    def read(self, piece: Piece) -> torch.Tensor:
        """The current values of a piece, in its shape; a view of the weight where it can be."""
        shard = self._shards[piece]
        start, value = local_value(shard.data)
        for tensor in _boxes(shard, start, value):
            if (tensor.key, tuple(tensor.global_offset)) == (piece.name, piece.offset):
                data: torch.Tensor = tensor.data.detach().reshape(piece.shape)
                return data
        raise AssertionError(piece)


def _finish_gather(chunk: Any) -> None:
    """Gathers weights that the next forward would gather."""
    ddp = getattr(chunk, "ddp_config", None)
    if ddp is None or not (ddp.use_distributed_optimizer and ddp.overlap_param_gather):
        return
    if ddp.reuse_grad_buf_for_mxfp8_param_ag:
        raise ValueError(
            "overlap_param_gather=True with reuse_grad_buf_for_mxfp8_param_ag=True gathers weights in the next forward,"
            " through the gradient buffer: set overlap_param_gather=False to stream them between two iterations."
        )
    chunk.start_param_sync(force_sync=True)


def _pieces(shard: Any) -> Iterator[Piece]:
    part = shard.data.piece if isinstance(shard.data, Fp8Parameter) else None
    start, shape = (None, shard.data.shape) if part is None else (part[0], (part[1] - part[0],))
    for tensor in _boxes(shard, start, torch.empty(shape, dtype=shard.data.dtype, device="meta")):
        if is_main_replica(tensor.replica_id):
            assert not tensor.prepend_axis_num and tensor.flattened_range is None, tensor.key
            offset, size, whole = tensor.global_offset, tensor.local_shape, tensor.global_shape
            yield Piece(tensor.key, tuple(offset), tuple(size), tuple(whole), tensor.data.dtype)


def _boxes(shard: Any, start: int | None, value: torch.Tensor) -> list[Any]:
    """The sharded tensors of a shard with these values: of all of it, or of a range of its elements from ``start`` on."""
    if start is not None:
        return split_into_boxes(shard, shard.key, value, start, replica=0) if value.numel() else []
    if isinstance(shard, ShardedTensorFactory):
        return tensors_of(replace(shard, data=value))
    return [replace(shard, data=value)]


def local_value(data: torch.Tensor) -> tuple[int | None, torch.Tensor]:
    """Returns (start, values) of a weight in its dtype, as a checkpoint has them: (None, all values), or the index of
    this rank's first value and its values [n]."""
    if not isinstance(data, Fp8Parameter):
        return None, data.detach()
    master = data.master
    if data.piece is None:
        value = data.dequantize() if master is None else master.detach().to(data.device)
        return None, value.reshape(data.shape).to(data.dtype)
    if data.piece[0] == data.piece[1]:
        return data.piece[0], torch.empty(0, dtype=data.dtype, device=data.device)
    if master is None:
        raise ValueError(
            "the optimizer keeps no float32 masters of FP8 weights: set use_precision_aware_optimizer=False."
        )
    return data.piece[0], master.detach().reshape(-1).to(data.dtype)

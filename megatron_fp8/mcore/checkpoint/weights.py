"""Weights that another program made: saved as a checkpoint, and loaded with their FP8 codes.

FP8 parameters keep an imported checkpoint's codes if they have the same scales (``blockwise`` with
``fp8_pow2_scales=False`` and ``fp8_param=True``), in a layout that splits the weight between blocks. The float32
masters are code * scale; each step casts from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from ...files.checkpoint import Manifest, read_tensor
from ...numerics.rule import BLOCK_128X128
from ...params.block_codes import BLOCK, codes_of, is_scales_key, scales_key
from ...params.fp8_parameter import Fp8Parameter
from ...state.collectives import first_rank_with
from .saver import SaveError, Saver
from .store import Make
from .training_state import tensors_of


def save_weights(folder: Path, weights: dict[str, torch.Tensor], manifest: Manifest, make: Make) -> None:
    """Saves whole tensors, by name, as a checkpoint in `folder`: from one process, or from all ranks together.

    Args:
        weights: this rank's, on the meta device: names, shapes and dtypes. No other rank has one of them.
        make: creates each one when it is written, in their order; one is in memory at a time.

    Raises, on all ranks, SaveError if the disk is full, or the folder cannot be written, and ValueError if `make` does.
    """
    errors: list[ValueError] = []

    def make_or_record(name: str) -> torch.Tensor:
        try:
            return make(name)
        except ValueError as error:  # the writer turns any exception into one of its own
            errors.append(error)
            raise

    with _process_group():
        shards = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in weights.items()}
        saver = Saver(folder)
        try:
            saver.save(shards, manifest, make_or_record)
        except SaveError:
            if (found := first_rank_with(errors[0] if errors else None)) is not None:
                raise found[1] from None
            raise
        saver.close()


@contextmanager
def _process_group() -> Iterator[None]:
    """Uses the existing process group, or creates one of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def take_codes(folder: Path, metadata: Any, model: dict[str, dict[str, Any]]) -> list[str]:
    """Sets this rank's FP8 parameters to their weights' original codes and scales; returns lines for the log.

    Args:
        metadata: the checkpoint's, from ``read_metadata``.
        model: sharded state dicts by chunk, over the live parameters.
    """
    if not any(map(is_scales_key, metadata.state_dict_metadata)):
        return []
    exact, rest = 0, 0
    for flat in model.values():
        for shard in flat.values():
            pieces = tensors_of(shard)
            if not all(scales_key(piece.key) in metadata.state_dict_metadata for piece in pieces):
                continue
            if _has_block_scales(shard.data) and _align_with_blocks(pieces):
                _set_codes(shard.data, pieces, folder, metadata)
                exact += 1
            else:
                rest += 1
    lines = [f"{exact} weights on a rank keep the FP8 codes and scales that they came with"] if exact else []
    if rest:
        lines.append(
            f"{rest} weights on a rank came as FP8 and were decoded: codes stay as they are with fp8_recipe=blockwise,"
            " fp8_pow2_scales=false and fp8_param=true, in layouts that cut no block of 128x128"
        )
    return lines


def _has_block_scales(parameter: Any) -> bool:
    if not isinstance(parameter, Fp8Parameter):
        return False
    return parameter.rule.granularity == BLOCK_128X128 and parameter.rule.scale == "fp32"


def _align_with_blocks(pieces: list[Any]) -> bool:
    """Whether the blocks of this rank's parameter, with rows ``pieces``, are blocks of the whole tensors."""
    for number, piece in enumerate(pieces):
        for axis in (0, 1):
            start, size, whole = piece.global_offset[axis], piece.local_shape[axis], piece.global_shape[axis]
            is_last = axis == 1 or number == len(pieces) - 1
            if start % BLOCK or (size % BLOCK and not (is_last and start + size == whole)):
                return False
    return True


def _set_codes(parameter: Fp8Parameter, pieces: list[Any], folder: Path, metadata: Any) -> None:
    codes, scales = [], []
    for piece in pieces:
        window = [slice(o, o + n) for o, n in zip(piece.global_offset, piece.local_shape, strict=True)]
        blocks = [slice(w.start // BLOCK, -(-w.stop // BLOCK)) for w in window]
        scale = read_tensor(folder, metadata, scales_key(piece.key))[tuple(blocks)]
        codes.append(codes_of(read_tensor(folder, metadata, piece.key)[tuple(window)], scale))
        scales.append(scale)
    device = parameter.device
    parameter.set_shard(0, 0, torch.cat([part.view(torch.uint8) for part in codes]).to(device))
    scale_inv = torch.cat(scales).contiguous().to(device)
    healthy = torch.zeros([], dtype=torch.float32, device=device)
    parameter.set_scales([scale_inv], healthy, healthy)  # so that dequantize works below
    parameter.set_scales([scale_inv], parameter.dequantize(torch.float32).abs().amax(), healthy)

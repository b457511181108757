"""FP8 parameters that start from an imported checkpoint's codes (params/block_codes.py).

That needs parameters with the same scales (``blockwise`` with ``fp8_pow2_scales=False`` and ``fp8_param=True``), and
a layout that splits the weight between blocks. The float32 masters are code * scale; each step casts from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from ...files.checkpoint import read_tensor
from ...numerics.rule import BLOCK_128X128
from ...params.block_codes import BLOCK, codes_of, is_scales_key, scales_key
from ...params.fp8_parameter import Fp8Parameter


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
            pieces = nested_values(shard.build()) if isinstance(shard, ShardedTensorFactory) else [shard]
            pieces = list(pieces)
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

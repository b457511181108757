"""128x128 block scales of imported weights, stored in a checkpoint for a later export.

An imported weight is decoded. If its codes can be recomputed from weight and scales, the scales are stored
with it (params/block_codes.py). An export then restores the original bytes, unless training has changed the
weight: training checkpoints have no such scales.
"""

from __future__ import annotations

from typing import Any

import torch

from ..params.block_codes import BLOCK, codes_of, scales_key
from .architectures import Entry
from .checkpoint_reader import WeightSource
from .directory import Tensors
from .qkv_layout import Heads, heads_of, join_qkv, split_qkv
from .weight_decoder import check_scale, scale_name


def block_scales(
    entry: Entry, tensors: Tensors, section: dict[str, Any], moved: bool = False
) -> tuple[torch.Tensor | None, dict[str, str]]:
    """Block scales of a checkpoint's tensor, float32 [rows / 128, cols / 128], rounded up, or None if there
    are none to store; and, if parts have block scales that cannot be stored, the reasons by name.

    For queries, keys and values these are the fused matrix's scales; heads must consist of whole blocks.

    Args:
        moved: rows of several blocks are mixed.
    """
    found = {name: _scale(name, tensors) for name in entry.parts}
    scales = [scale for scale in found.values() if isinstance(scale, torch.Tensor)]
    lost = {name: why for name, why in found.items() if isinstance(why, str)}
    blocks = _blocks(section) if entry.qkv else None
    if entry.site is None:
        why = "no export has it in FP8"
    elif moved:
        why = "rows were put in pairs, since rope_interleave=false, and blocks are others now"
    elif len(scales) < len(entry.parts):
        why = "another part of the same matrix keeps none"
    elif entry.qkv and blocks is None:
        why = f"its heads of {heads_of(section).head_dim} rows are no whole blocks"
    elif blocks is not None:
        return join_qkv(scales[0], scales[1], scales[2], blocks), {}
    else:
        return scales[0], {}
    return None, lost | {name: why for name, scale in found.items() if isinstance(scale, torch.Tensor)}


def _scale(name: str, tensors: Tensors) -> torch.Tensor | str | None:
    """A part's scales, if they are float32 block scales and its codes follow from them and the decoded
    weight; otherwise the reason; None if it has no block scales.

    Codes can be recomputed if products are normal numbers, which `check_scale` ensures: product and quotient
    each have a relative error of at most 2^-24.
    """
    scale_key = scale_name(name, tensors.names())
    if scale_key is None or not scale_key.endswith("_scale_inv"):
        return None
    scale, blocks = tensors[scale_key], [-(-size // BLOCK) for size in tensors.shape(name)]
    if scale.dtype != torch.float32:
        return f"its scales are {scale.dtype}, and not float32"
    if list(scale.shape) != blocks:
        return f"its scales are {list(scale.shape)}, and not one for each 128x128 block"
    check_scale(name, scale)
    return scale


def _blocks(section: dict[str, Any]) -> Heads | None:
    """Attention sizes in rows of blocks; None if a head does not consist of whole blocks."""
    heads = heads_of(section)
    if heads.head_dim % BLOCK:
        return None
    return Heads(heads.heads, heads.groups, heads.head_dim // BLOCK)


# ------------------------------------------------------------------------------------------------------------- export


def has_block_scales(source: WeightSource, entry: Entry) -> bool:
    """Whether the checkpoint stores block scales for this tensor."""
    return source.stored_dtype(scales_key(entry.megatron)) is not None


def high_precision_linears(source: WeightSource, listed: list[Entry]) -> set[str]:
    """Linears that were not in blocks in a block-FP8 directory; none if the checkpoint has no such scales."""
    if not source.origin.was_in_blocks and not any(has_block_scales(source, entry) for entry in listed):
        return set()
    plain = [
        entry
        for entry in listed
        if entry.site is not None
        and (
            source.stored_dtype(entry.megatron) == torch.bfloat16  # decoded weights are float32
            or source.origin.dtype(entry.megatron) is not None
        )
    ]
    return {part.removesuffix(".weight") for entry in plain for part in entry.parts}


def original_codes(
    source: WeightSource, entry: Entry, parts: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Codes and scales by name, byte-identical to the imported directory, for the parts of a checkpoint's
    tensor.

    Args:
        parts: by name, in the checkpoint's dtype.
    """
    scale = source.tensor(scales_key(entry.megatron), as_stored=True)
    blocks = _blocks(source.section) if entry.qkv else None
    scales = split_qkv(scale, blocks) if blocks is not None else (scale,)
    found = {}
    for (name, weight), own in zip(parts.items(), scales, strict=True):
        found[name] = codes_of(weight, own)
        found[f"{name}_scale_inv"] = own
    return found

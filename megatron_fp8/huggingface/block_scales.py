"""128x128 block scales of imported weights: kept in a checkpoint for the export.

A weight comes in decoded, and its scales beside it, where its codes follow from both (params/block_codes.py). It goes
out with the bytes that it came with, until training changes it: checkpoints of training have no such scales.
"""

from __future__ import annotations

from typing import Any

import torch

from ..params.block_codes import BLOCK, codes_of, scales_key
from .architectures import Entry
from .config import heads_of
from .directory import Tensors
from .formats import check_scale, scale_name
from .layout import Heads, join_qkv, split_qkv
from .source import Source


def block_scales(
    entry: Entry, tensors: Tensors, section: dict[str, Any], moved: bool = False
) -> tuple[torch.Tensor | None, dict[str, str]]:
    """The scales of a checkpoint's tensor, float32 [rows / 128, cols / 128], rounded up, or None if it has none to keep;
    and, if parts have scales of blocks and do not keep them, why, by their names.

    Of queries, keys and values they are the fused matrix's, whose heads must be whole blocks.

    Args:
        moved: rows of several blocks come together in it.
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
    """A part's scales, if they are float32 for blocks, and its codes follow from them and from the decoded weight; if
    not, why; None if it has no scales of blocks.

    They do where products are normal, as `check_scale` asks: such a one and the quotient are each off by 2^-24 of itself.
    """
    beside = scale_name(name, tensors.names())
    if beside is None or not beside.endswith("_scale_inv"):
        return None
    scale, blocks = tensors[beside], [-(-size // BLOCK) for size in tensors.shape(name)]
    if scale.dtype != torch.float32:
        return f"its scales are {scale.dtype}, and not float32"
    if list(scale.shape) != blocks:
        return f"its scales are {list(scale.shape)}, and not one for each 128x128 block"
    check_scale(name, scale)
    return scale


def _blocks(section: dict[str, Any]) -> Heads | None:
    """Sizes of attention in rows of blocks; None where blocks are not whole in a head."""
    heads = heads_of(section)
    if heads.head_dim % BLOCK:
        return None
    return Heads(heads.heads, heads.groups, heads.head_dim // BLOCK)


# ------------------------------------------------------------------------------------------------------------- going out


def came_as_blocks(source: Source, entry: Entry) -> bool:
    """Whether the scales of a checkpoint's tensor are there."""
    return scales_key(entry.megatron) in source.metadata.state_dict_metadata


def came_in_high_precision(source: Source, listed: list[Entry]) -> set[str]:
    """Linears of a directory in blocks that were not in blocks there; none of a checkpoint that has no such scales."""
    if not source.origin.was_in_blocks and not any(came_as_blocks(source, entry) for entry in listed):
        return set()
    stored = source.metadata.state_dict_metadata
    plain = [
        entry
        for entry in listed
        if entry.site is not None
        and (
            stored[entry.megatron].properties.dtype == torch.bfloat16  # what is decoded is float32
            or source.origin.dtype(entry.megatron) is not None
        )
    ]
    return {part.removesuffix(".weight") for entry in plain for part in entry.parts}


def as_it_came(source: Source, entry: Entry, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Codes and scales by name, byte for byte those of the directory, of the parts of a checkpoint's tensor.

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

"""The plan of an import: each checkpoint tensor, made on request from the directory's.

The conversion is lossless: BF16 weights stay BF16; other formats, and FP8 codes times their scales, become
float32.
"""

from __future__ import annotations

from typing import Any

import torch

from ..params.block_codes import is_scales_key, scales_key
from .architectures import Entry
from .block_scales import block_scales
from .config import heads_of
from .directory import Tensors
from .formats import decode, scale_name
from .layout import interleave, join_qkv, pad_rows
from .shapes import megatron_shape


class ImportPlan:
    """A checkpoint's tensors, made from a directory's.

    Attributes:
        described: name -> meta tensor with shape and dtype, in forward order.
        kept_scales: number of FP8 weights with stored scales.
        lost: block-FP8 weights without stored scales -> reason.

    Args:
        halves: the directory's latent heads rotate the first half against the second.

    Raises ValueError naming a tensor of an unsupported type.
    """

    def __init__(self, tensors: Tensors, listed: list[Entry], section: dict[str, Any], halves: bool) -> None:
        self._tensors, self._section, self._halves = tensors, section, halves
        self._entries: dict[str, Entry] = {}
        self.described: dict[str, torch.Tensor] = {}
        self.kept_scales = 0
        self.lost: dict[str, str] = {}
        for entry in listed:
            if not entry.copy:
                self._describe(entry)

    def _describe(self, entry: Entry) -> None:
        shape = megatron_shape(entry, self._section)
        if entry.vocabulary:
            shape[0] = self._section["padded_vocab_size"]
        found = {_dtype(name, self._tensors) for name in entry.parts}
        dtype = torch.bfloat16 if found == {torch.bfloat16} else torch.float32
        self._entries[entry.megatron] = entry
        self.described[entry.megatron] = torch.empty(shape, dtype=dtype, device="meta")
        scales, lost = self._scales(entry)
        self.lost |= lost
        if scales is not None:
            key = scales_key(entry.megatron)
            self._entries[key] = entry
            self.described[key] = scales.to("meta")
            self.kept_scales += len(entry.parts)

    def parameters(self) -> int:
        """Number of values of all weights, including the vocabulary's padding."""
        return sum(tensor.numel() for name, tensor in self.described.items() if not is_scales_key(name))

    def make(self, name: str) -> torch.Tensor:
        """The tensor of that name. Raises ValueError if it is not finite, or its scales fit no format."""
        entry = self._entries[name]
        if not is_scales_key(name):
            return self._weight(entry)
        scales, _ = self._scales(entry)
        assert scales is not None, name
        return scales

    def _scales(self, entry: Entry) -> tuple[torch.Tensor | None, dict[str, str]]:
        return block_scales(entry, self._tensors, self._section, moved=self._halves and entry.turned)

    def _weight(self, entry: Entry) -> torch.Tensor:
        parts = [high_precision(name, self._tensors) for name in entry.parts]
        if entry.qkv:
            dtype = self.described[entry.megatron].dtype
            query, key, value = (part.to(dtype) for part in parts)
            parts = [join_qkv(query, key, value, heads_of(self._section))]
        (tensor,) = parts
        if self._halves and entry.turned:
            heads = self._section["num_attention_heads"] if entry.shape[0] == "queries" else 1
            tensor = interleave(tensor, heads, self._section["qk_pos_emb_head_dim"])
        return pad_rows(tensor, self._section["padded_vocab_size"]) if entry.vocabulary else tensor


def _dtype(name: str, tensors: Tensors) -> torch.dtype:
    """Dtype of the converted tensor: bfloat16 if stored so, else float32."""
    stored, scaled = tensors.dtype(name), scale_name(name, tensors.names()) is not None
    if scaled and stored != torch.float8_e4m3fn:
        raise ValueError(f"{name} is {stored} with a scale: float8_e4m3fn can be imported.")
    if not scaled and stored not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} is {stored} without a scale: it cannot be imported.")
    return torch.bfloat16 if stored == torch.bfloat16 else torch.float32


def high_precision(name: str, tensors: Tensors) -> torch.Tensor:
    """A tensor without loss: bfloat16 if stored so, else float32; FP8 as code times scale.

    Raises ValueError naming it: its type is unsupported, or it is not finite.
    """
    _dtype(name, tensors)
    tensor, scale = tensors[name], scale_name(name, tensors.names())
    if scale is not None:
        tensor = decode(name, tensor, tensors[scale])
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} holds NaN or Inf: the file is damaged, or training diverged.")
    return tensor if tensor.dtype == torch.bfloat16 else tensor.float()

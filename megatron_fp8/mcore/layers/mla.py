"""Multi-latent attention with a KV cache of latents.

For each token the cache holds the latent of all heads' keys and values, after its norm, and the rotated key that all
heads share: ``kv_lora_rank + qk_pos_emb_head_dim`` values a layer, whatever the number of heads. Megatron-Core's
static cache holds the keys and values of all heads; its cache of latents needs Transformer Engine's layers, a GPU
kernel and its dynamic batching.

Each call runs the up projection on the latents of all tokens again: one GEMM with many rows, by the same layer as in
training, so in the same precision and with the same bits. Rejected: absorption, which multiplies the up projection's
weight into queries and into attention's result, and attends to latents. These are other GEMMs with other operands,
attention's among them, than in training: FP8 would have no codes for them, and logits would differ from the training
forward's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from ..patches.patching import Patch
from .attention import RotatedKeys

_MODULE = "megatron.core.transformer.multi_latent_attention"


def latents_kept(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps MLASelfAttention.get_query_key_value_tensors: caches latents in a RotatedKeys context.

    Returns the keys [seen, b, heads, d] and values [seen, b, heads, dv] of all tokens so far.
    """

    @functools.wraps(original)
    def get_query_key_value_tensors(
        self: Any, *args: Any, inference_context: Any = None, **kwargs: Any
    ) -> Any:
        result = original(self, *args, inference_context=inference_context, **kwargs)
        if not isinstance(inference_context, RotatedKeys):
            return result
        query, key, value, *compressed = result
        start = inference_context.sequence_len_offset
        # [n, b, kv_lora_rank], and the part of their keys that all heads share.
        latents, rotated = _append_to_cache(
            self, inference_context, compressed[-1], key[:, :, 0, self.config.qk_head_dim :]
        )
        if start:
            key, value = _project_up(self, latents[: start + len(key)], rotated[: start + len(key)])
        return query, key, value, *compressed

    return get_query_key_value_tensors


def keys_and_values_as_they_are(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps MultiLatentAttention._adjust_key_value_for_inference: keys and values of all tokens pass unchanged."""

    @functools.wraps(original)
    def adjusted(
        self: Any,
        inference_context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(inference_context, RotatedKeys):
            return original(self, inference_context, query, key, value, *args, **kwargs)
        kind = AttnMaskType.no_mask if inference_context.sequence_len_offset else self.attn_mask_type
        return query, key, value, None, kind, None

    return adjusted


def _append_to_cache(
    attention: Any, context: RotatedKeys, latents: Tensor, rotated: Tensor
) -> tuple[Tensor, Tensor]:
    """Appends to the layer's cache; returns [max_length, b, kv_lora_rank] and [max_length, b, qk_pos_emb_head_dim]."""
    memory = context.key_value_memory_dict
    if attention.layer_number not in memory:
        room = context.max_sequence_length, context.max_batch_size
        memory[attention.layer_number] = tuple(
            torch.empty(*room, part.shape[-1], dtype=part.dtype, device=part.device)
            for part in (latents, rotated)
        )
    start, first = context.sequence_len_offset, context.batch_size_offset
    for target, new in zip(memory[attention.layer_number], (latents, rotated), strict=True):
        target[start : start + len(new), first : first + new.shape[1]] = new
    batch = slice(first, first + latents.shape[1])
    of_latents, of_keys = memory[attention.layer_number]
    return of_latents[:, batch], of_keys[:, batch]


def _project_up(attention: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's keys and values, from latents [s, b, kv_lora_rank] and rotated keys [s, b,
    qk_pos_emb_head_dim]."""
    config, heads = attention.config, attention.num_attention_heads_per_partition
    both, _ = attention.linear_kv_up_proj(latents)
    both = both.unflatten(-1, (heads, config.qk_head_dim + config.v_head_dim))
    key, value = both.split([config.qk_head_dim, config.v_head_dim], dim=-1)
    return torch.cat([key, rotated.unsqueeze(2).expand(-1, -1, heads, -1)], dim=-1), value


def patches() -> list[Patch]:
    """Returns the patches for a cache of latents."""
    return [
        Patch(
            f"{_MODULE}.MLASelfAttention",
            "get_query_key_value_tensors",
            latents_kept,
            "a cache would hold the keys and values of all heads, not the latents that they are made of",
            wrap=True,
        ),
        Patch(
            f"{_MODULE}.MultiLatentAttention",
            "_adjust_key_value_for_inference",
            keys_and_values_as_they_are,
            "keys and values that are made of cached latents would be cached a second time",
            wrap=True,
        ),
    ]

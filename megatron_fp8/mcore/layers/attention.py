"""Core attention without Transformer Engine, for CPUs and context parallelism.

Megatron-Core's DotProductAttention materialises the whole score matrix and refuses context parallelism. `CoreAttention`
is that class with another forward where both are equivalent: PyTorch's scaled_dot_product_attention, which computes
scores in float32 and saves q, k, v and one number a row. Options that it does not have (attention dropout, sliding
windows, softmax offsets, explicit masks) run Megatron-Core's own forward, or are refused under context parallelism.

Under context parallelism the sequence is split into 2*cp chunks, and rank r holds chunks r and 2*cp-1-r ("zigzag", the
order of get_batch_on_this_cp_rank), so that causal work is balanced. Keys and values are all-gathered over the CP group;
their gradients are reduce-scattered. config.cp_comm_type selects other ways to move the same data and is not read.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.utils.weak import WeakTensorKeyDictionary

from ...linear.saved_operands import first_derivative_only
from ...numerics import host_sync
from ..patches.patching import PatchList

patches = PatchList()
_read = WeakTensorKeyDictionary()
"""Tensors of sequences' ends -> their version when they were read, and their values."""
_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CoreAttention(DotProductAttention):
    """softmax(q k^T * scale) v for Megatron-Core's SelfAttention, constructed like DotProductAttention.

    Multi-latent attention passes k_channels and v_channels, a head's sizes of keys and values, which differ there.

    Raises ValueError for attention dropout, sliding windows, softmax offsets or query-key layer scaling when
    context_parallel_size > 1.
    """

    def __init__(
        self,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ):
        local = copy.copy(config)
        local.context_parallel_size = 1  # the parent asserts it; everything it prepares is per rank
        super().__init__(local, *args, **kwargs)
        self.config = config
        if (
            v_channels is not None
        ):  # the width of the parent's result; the parent assumes kv_channels for values too
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        self._extra = _options_without_sdpa(self)
        self.cp_group = None
        if config.context_parallel_size > 1:
            groups = self.pg_collection  # the parent's default has no CP group
            self.cp_group = groups.cp if hasattr(groups, "cp") else get_context_parallel_group()
        if self.cp_group is not None and self._extra:
            raise ValueError(
                f"{', '.join(self._extra)} cannot be combined with "
                f"context_parallel_size={config.context_parallel_size}; switch off one of them"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [sq, b, heads, d], key [sk, b, groups, d], value [sk, b, groups, dv] -> [sq, b, heads * dv].

        With packed sequences (`packed_seq_params`, format 'thd'): query [t, heads, d], key and value likewise, result
        [t, heads * dv]. Each sequence attends to itself, in one call a sequence, and padding gives zeros.

        Under context parallelism sq = sk is this rank's part and must be even. As in the parent, the mask type given
        at construction counts and `attn_mask_type` is not read.
        """
        causal = self.attn_mask_type == AttnMaskType.causal
        masks = [attention_bias, packed_seq_params, attention_mask if not causal else None]
        plain = causal or (self.attn_mask_type == AttnMaskType.no_mask and attention_mask is None)
        if self.cp_group is not None:
            if not plain or any(x is not None for x in masks):
                raise ValueError(
                    "context parallelism takes causal or no_mask attention, "
                    "without a given mask, bias or packed sequences"
                )
            context = _zigzag(query, key, value, self.cp_group, self.softmax_scale, causal)
        elif packed_seq_params is not None and not self._extra and plain and attention_bias is None:
            return _packed(query, key, value, packed_seq_params, self.softmax_scale, causal).flatten(1)
        elif self._extra or not plain or any(x is not None for x in masks):
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
        else:
            context = _sdpa(query, key, value, self.softmax_scale, **_causal_mask(query, key, causal))
        return context.flatten(2)


def _options_without_sdpa(attention: DotProductAttention) -> list[str]:
    """Returns the options in use that scaled_dot_product_attention does not have (or has with other random bits)."""
    config, softmax = attention.config, attention.scale_mask_softmax
    options = {
        "attention_dropout": attention.attention_dropout.p > 0,
        "window_size": softmax.window_size is not None,
        f"softmax_type={config.softmax_type!r}": config.softmax_type != "vanilla",
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
    }
    return [name for name, used in options.items() if used]


def _causal_mask(query: Tensor, key: Tensor, causal: bool) -> dict[str, Any]:
    """Returns the mask arguments for SDPA. Fewer queries than keys are the last ones (a KV cache has the rest)."""
    queries, keys = len(query), len(key)
    if queries == keys or not causal:
        return {"is_causal": causal}
    if queries == 1:
        return {}
    return {"attn_mask": _last_queries_mask(queries, keys, query.device)}


def _last_queries_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns the causal mask of the last queries among as many positions as keys, [queries, keys].

    On a GPU it is a CausalBias without data, which torch passes to flash attention. A mask in memory has quadratic
    size, runs the slower kernels, and in cuDNN gives NaN gradients (pytorch#196678).
    """
    if host_sync.reading_syncs(device):
        # Not with torch's constructor, which allocates the whole mask.
        mask = torch.empty(0, dtype=torch.float32, device="cpu").as_subclass(CausalBias)
        mask.variant, mask.seq_len_q, mask.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
        return mask
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, **mask: Any) -> Tensor:
    """Attention of q [sq, b, heads, d] to k [sk, b, groups, d], v [sk, b, groups, dv]: [sq, b, heads, dv], contiguous.

    Grouped queries share their key and value head inside the kernel; nothing is repeated.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    masked = "attn_mask" in mask and host_sync.reading_syncs(q.device)
    with sdpa_kernel(_NOT_CUDNN) if masked else nullcontext():
        context = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **mask)
    return context.permute(2, 0, 1, 3).contiguous()


def _packed(q: Tensor, k: Tensor, v: Tensor, packed: Any, scale: float, causal: bool) -> Tensor:
    """Attention within each of the consecutive sequences in q [t, heads, d], k and v [t, groups, d]: [t, heads, dv]."""
    parts = []
    # Each int32 [sequences + 1]; padded: with the padding between sequences, None without padding.
    ends = (
        packed.cu_seqlens_q,
        packed.cu_seqlens_q_padded,
        packed.cu_seqlens_kv,
        packed.cu_seqlens_kv_padded,
    )
    of_q, padded_q, of_k, padded_k = (None if end is None else _values(end) for end in ends)
    assert of_q is not None and of_k is not None, "packed sequences say where they end"
    queries, keys = _sequences(of_q, padded_q, len(q)), _sequences(of_k, padded_k, len(k))
    for (start, length, room), (key_start, key_length, _) in zip(queries, keys, strict=True):
        q_i, k_i, v_i = (
            x.unsqueeze(1)
            for x in (
                q[start : start + length],
                k[key_start : key_start + key_length],
                v[key_start : key_start + key_length],
            )
        )
        parts.append(_sdpa(q_i, k_i, v_i, scale, **_causal_mask(q_i, k_i, causal)).squeeze(1))
        parts.append(q.new_zeros(room - length, q.shape[1], v.shape[-1]))
    return torch.cat(parts)


def _values(ends: Tensor) -> list[int]:
    """Returns the values of an integer tensor. All layers of a microbatch share it: each read waits for a GPU."""
    version = None if ends.is_inference() else ends._version
    if ends not in _read or _read[ends][0] != version:
        _read[ends] = version, ends.tolist()
    values: list[int] = _read[ends][1]
    return values


def _sequences(ends: list[int], padded: list[int] | None, total: int) -> list[tuple[int, int, int]]:
    """Returns (start, length, padded length) of each packed sequence; the last one's padding ends with the tensor."""
    starts = (padded or ends)[:-1]
    lengths = [end - start for start, end in itertools.pairwise(ends)]  # padding excluded
    return [
        (start, length, following - start)
        for start, length, following in zip(starts, lengths, [*starts[1:], total], strict=True)
    ]


def _zigzag(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, scale: float, causal: bool) -> Tensor:
    """Attention of this rank's two chunks of queries to all keys of the sequence that the causal mask allows."""
    if len(q) != len(k) or len(q) % 2:
        raise ValueError(
            f"context parallelism needs as many queries as keys, an even number; got {len(q)} and {len(k)}"
        )
    # One gather for both: [s / cp, b, groups, d + dv] -> [s, b, groups, d + dv], in sequence order.
    both = _GatherZigzag.apply(torch.cat([k, v], dim=-1), group).flatten(0, 1)
    k, v = both.split([k.shape[-1], v.shape[-1]], dim=-1)
    if not causal:
        return _sdpa(q, k, v, scale)
    rank, size, n = dist.get_rank(group), dist.get_world_size(group), len(q) // 2
    parts = []
    for queries, chunk in zip(q.split(n), (rank, 2 * size - 1 - rank), strict=True):
        visible = (chunk + 1) * n
        mask = _last_queries_mask(n, visible, q.device)
        parts.append(_sdpa(queries, k[:visible], v[:visible], scale, attn_mask=mask))
    return torch.cat(parts)


def zigzag_positions(size: int, device: Any = "cpu") -> Tensor:
    """Returns the indices of chunks 0, 1, ... of the sequence among the 2 * size chunks in rank order: int64 [2 * size].

    Created on the device: a copy from the host would wait, in each layer.
    """
    first, last = ((0, 2 * size, 2), (2 * size - 1, 0, -2))
    return torch.cat([torch.arange(*part, device=device, dtype=torch.int64) for part in (first, last)])


class _GatherZigzag(torch.autograd.Function):
    """[s/cp, ...] in zigzag order -> [2*cp, s/(2*cp), ...], all chunks in sequence order; backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        gathered = x.new_empty(size * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        chunks = gathered.unflatten(0, (2 * size, -1))
        return chunks.index_select(0, zigzag_positions(size, x.device))

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        size, chunks = dist.get_world_size(ctx.group), grads[0]
        order = zigzag_positions(size, chunks.device)
        by_rank = torch.empty_like(chunks).index_copy_(0, order, chunks).flatten(0, 1)
        out = by_rank.new_empty(len(by_rank) // size, *by_rank.shape[1:])
        dist.reduce_scatter_tensor(out, by_rank, group=ctx.group)
        return out, None


class RotatedKeys(StaticInferenceContext):
    """Megatron-Core's static KV cache, with rotated keys: each key is rotated once, when its token arrives.

    Megatron-Core's own holds unrotated keys, and rotates all of them again for every decoded token: with 8 sequences of
    257 tokens that took longer than a layer's attention and norms together. A rotation depends on one token and its
    position alone, so the keys have the same bytes either way.

    Rejected: Megatron-Core's ``flash_decode``, whose cache holds rotated keys too: it needs flash attention and a GPU.
    """


@patches.wrap(
    "transformer.attention.Attention._adjust_key_value_for_inference",
    "every token decoded would rotate the keys of all tokens again",
)
def rotate_once(
    original: Callable[..., Any],
    self: Any,
    inference_context: Any,
    query: Any,
    key: Any,
    value: Any,
    rotary_pos_emb: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Rotates new keys before a RotatedKeys context stores them."""
    if rotary_pos_emb is None or not isinstance(inference_context, RotatedKeys):
        return original(self, inference_context, query, key, value, rotary_pos_emb, *args, **kwargs)
    start = inference_context.sequence_len_offset
    key = apply_rotary_pos_emb(
        key,  # [tokens, b, groups, d]
        rotary_pos_emb[1][start : start + len(key)],
        config=self.config,
        mscale=_yarn_get_concentration_factor_from_config(self.config),
        cp_group=self.pg_collection.cp,
    )
    query, key, value, (of_queries, _), *rest = original(
        self, inference_context, query, key, value, rotary_pos_emb, *args, **kwargs
    )
    return query, key, value, (of_queries, None), *rest

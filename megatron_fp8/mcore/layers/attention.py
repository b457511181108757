"""Core attention without Transformer Engine: backends of attention, and context parallelism.

Megatron-Core's DotProductAttention materialises the score matrix, does not read config.attention_backend and refuses
context parallelism. `CoreAttention` is that class with another forward where both are equivalent: PyTorch's
scaled_dot_product_attention, which computes scores in float32 and saves q, k, v and one number a row. Options that it
does not have (attention dropout, sliding windows, softmax offsets, explicit masks) run Megatron-Core's own forward if
attention_backend is 'auto'; a backend that is named runs them or refuses them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import get_sliding_window_causal_mask, is_layer_window_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.utils.weak import WeakTensorKeyDictionary

from ...numerics import host_sync
from ..patches.patching import PatchList
from .attention_kernels import SDPA_KERNELS, check_backend, chosen_backend
from .context_parallel import (
    COMM_TYPES,
    ExchangeHeads,
    Ring,
    gather_keys_values,
    gather_rows,
    hidden_keys,
    ring_attention,
)

patches = PatchList()
_read = WeakTensorKeyDictionary()
"""Tensors of sequences' ends -> their version when they were read, and their values."""
_NOT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class CoreAttention(DotProductAttention):
    """softmax(q k^T * scale) v for Megatron-Core's SelfAttention, constructed like DotProductAttention.

    Multi-latent attention passes k_channels and v_channels, a head's sizes of keys and values, which differ there.

    Raises:
        ValueError: config.attention_backend cannot run here, or not with other options of attention; or under context
            parallelism cp_comm_type is unknown, or cannot be combined with other options.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        **kwargs: Any,
    ):
        local = copy.copy(config)
        local.context_parallel_size = 1  # the parent asserts it; everything it prepares is per rank
        # Of a list Megatron-Core passes another layer's: it is refused as a whole.
        given = config.cp_comm_type if isinstance(config.cp_comm_type, list) else cp_comm_type
        self._comm_type = given or config.cp_comm_type or "all_gather"
        # A context-parallel rank's masks are written out: the parent's are of whole sequences.
        if config.context_parallel_size > 1:
            local.window_size, local.masked_softmax_fusion = None, False
        super().__init__(local, layer_number, attn_mask_type, *args, **kwargs)
        self.config = config
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size if windowed else None
        if config.softmax_type == "learnable":  # the parent does not say whose heads these are
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if v_channels is not None:  # the parent assumes kv_channels for values too
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        width = self.hidden_size_per_attention_head
        self._widths = (k_channels or width, v_channels or width)
        self._extra = _options_without_sdpa(self)
        self._backend = chosen_backend(config)
        self._named = self._backend in SDPA_KERNELS
        self._megatrons = self._backend == "unfused" or bool(self._backend == "auto" and self._extra)
        self._is_causal = attn_mask_type == AttnMaskType.causal
        self._takes_mask = attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask)
        self.cp_group: dist.ProcessGroup | None = None
        if config.context_parallel_size > 1:
            groups = self.pg_collection  # the parent's default has no CP group
            self.cp_group = groups.cp if hasattr(groups, "cp") else get_context_parallel_group()
            _check_context_parallel(self)
            if self._comm_type == "a2a":
                self.hidden_size_per_partition //= config.context_parallel_size
        if self._named:
            self._check_named(masked=self._window is not None or self._takes_mask)

    def _check_named(self, masked: bool) -> None:
        others = [name for name in self._extra if name not in ("attention_dropout", "window_size")]
        if others:
            raise ValueError(
                f"{', '.join(others)} cannot be combined with attention_backend={self._backend!r},"
                " whose kernels do not have it: set attention_backend to 'auto' or 'unfused'"
            )
        config = self.config
        dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else config.params_dtype
        heads, groups = self.num_attention_heads_per_partition, self.num_query_groups_per_partition
        dropout = self.attention_dropout.p
        check_backend(self._backend, dtype, heads, groups, self._widths, dropout_p=dropout, masked=masked)

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

        attention_mask is bool [b or 1, 1, sq, sk], True where a query does not see a key. Windows ignore it, and
        causal attention that Megatron-Core's math does not compute. As in the parent, the mask type given at
        construction counts and `attn_mask_type` is not read.

        With packed sequences (`packed_seq_params`, format 'thd'): query [t, heads, d], key and value likewise, result
        [t, heads * dv]. Each sequence attends to itself, in one call a sequence, and padding gives zeros.

        Under context parallelism sq = sk is this rank's part and must be even; attention_mask has this rank's rows,
        and the whole sequence's columns in their order, as get_batch_on_this_cp_rank cuts it.
        """
        hidden = attention_mask if self._megatrons or not self._is_causal else None
        plain = hidden is None and attention_bias is None and not self._takes_mask
        if self.cp_group is not None:
            if attention_bias is not None or packed_seq_params is not None:
                raise ValueError("context parallelism takes neither an attention bias nor packed sequences")
            return self._forward_parallel(query, key, value, hidden, self.cp_group)
        if packed_seq_params is not None and plain and not self._megatrons and self._window is None:
            with self._rng():
                return _packed(
                    query,
                    key,
                    value,
                    packed_seq_params,
                    self.softmax_scale,
                    self._is_causal,
                    **self._options(),
                ).flatten(1)
        if (
            packed_seq_params is None
            and attention_bias is None
            and (self._named or (plain and not self._megatrons))
        ):
            return self._attend(query, key, value, hidden)
        return super().forward(  # it refuses packed sequences and biases
            query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None) -> Tensor:
        """Attention of [sq, b, heads, d] to whole sequences, with Megatron-Core's math or SDPA: [sq, b, heads * dv]."""
        if self._window is not None:
            hidden = get_sliding_window_causal_mask(len(query), len(key), self._window)
        if self._megatrons or (hidden is not None and not self._named):
            return super().forward(query, key, value, hidden)
        mask = _causal_mask(query, key, self._is_causal) if hidden is None else self._given_mask(hidden)
        with self._rng():
            return _sdpa(query, key, value, self.softmax_scale, **mask, **self._options()).flatten(2)

    def _given_mask(self, hidden: Tensor) -> dict[str, Tensor]:
        """Returns the mask argument for SDPA, where a query that sees no key gives zeros."""
        self._check_named(masked=True)
        return {"attn_mask": ~hidden}

    def _options(self) -> dict[str, Any]:
        """Returns what a named backend adds to a call of SDPA."""
        if not self._named:
            return {}
        dropout = self.attention_dropout.p if self.training else 0.0
        return {"backend": self._backend, **({"dropout_p": dropout} if dropout else {})}

    def _rng(self) -> AbstractContextManager[None]:
        """Context: dropout inside a kernel draws from this tensor-parallel rank's stream, as the parent's does."""
        drops = "dropout_p" in self._options() and not self.config.sequence_parallel
        return get_cuda_rng_tracker().fork() if drops else nullcontext()

    def _forward_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        """Attention of this rank's two chunks of queries to all keys of the sequence that masks allow."""
        if len(query) != len(key) or len(query) % 2:
            raise ValueError(
                "context parallelism needs as many queries as keys, an even number; got"
                f" {len(query)} and {len(key)}"
            )
        if hidden is None and self._takes_mask:
            raise ValueError(
                f"attn_mask_type={self.attn_mask_type.name} under context parallelism needs attention_mask"
            )
        scale = self.softmax_scale
        whole = dist.get_world_size(group) * len(key)
        if hidden is not None and hidden.shape[-2:] != (len(query), whole):
            raise ValueError(
                f"attention_mask of {len(query)} queries and {whole} keys is needed on this context-parallel rank; got"
                f" {tuple(hidden.shape)}"
            )
        if self._comm_type == "a2a":
            query, key, value = (ExchangeHeads.apply(x, group, True) for x in (query, key, value))
            context = self._attend(query, key, value, None if hidden is None else gather_rows(hidden, group))
            return ExchangeHeads.apply(context.unflatten(2, (query.shape[2], -1)), group, False).flatten(2)
        if self._window is not None:
            hidden = hidden_keys(len(query), group, self._window, query.device)
        if self._comm_type == "p2p":
            ring = Ring(group, scale, self._is_causal, self._backend)
            return ring_attention(query, key, value, hidden, ring).flatten(2)
        key, value = gather_keys_values(key, value, group)
        if hidden is None and self._megatrons and self._is_causal:
            hidden = hidden_keys(len(query), group, None, query.device)
        if self._megatrons or (hidden is not None and not self._named):
            return super().forward(query, key, value, hidden)
        if hidden is None and self._is_causal:
            return _zigzag(query, key, value, group, scale, **self._options()).flatten(2)
        options = self._options() if hidden is None else {**self._options(), **self._given_mask(hidden)}
        return _sdpa(query, key, value, scale, **options).flatten(2)


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


def _check_context_parallel(attention: CoreAttention) -> None:
    """Raises ValueError for a cp_comm_type that is unknown, or that cannot do what other options ask."""
    config, kind, extra = attention.config, attention._comm_type, attention._extra
    size, setting = config.context_parallel_size, f"cp_comm_type={kind!r}"
    if kind not in COMM_TYPES:
        raise ValueError(
            f"{setting} must be one of {', '.join(map(repr, COMM_TYPES))}, for all layers: 'a2a+p2p' needs groups of two"
            " levels, which are not made here, and Megatron-Core 0.16 reads a list one layer too far"
        )
    missing = {
        "all_gather": ("attention_dropout",),
        "p2p": ("attention_dropout", "softmax_type", "apply_query_key_layer_scaling"),
        "a2a": ("attention_dropout", "softmax_type"),
    }[kind]
    refused = [name for name in extra if name.startswith(missing)]
    if refused:
        raise ValueError(
            f"{', '.join(refused)} cannot be combined with context_parallel_size={size} and {setting}; switch off one"
            " of them, or (for all but attention_dropout) set cp_comm_type='all_gather'"
        )
    counts = (attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition)
    if kind == "a2a" and any(count % size for count in counts):
        raise ValueError(
            f"{setting} gives each of context_parallel_size={size} ranks some of a tensor-parallel rank's {counts[0]}"
            f" heads and {counts[1]} groups of keys, which must be multiples of it. Set cp_comm_type to 'p2p' or"
            " 'all_gather'"
        )
    if attention._named:
        _check_named_parallel(attention, setting)


def _check_named_parallel(attention: CoreAttention, setting: str) -> None:
    kind, backend = attention._comm_type, attention._backend
    if kind == "p2p" and (attention._window is not None or attention._takes_mask):
        raise ValueError(
            f"attention_backend={backend!r} has no masks or windows in a ring ({setting}): set attention_backend to"
            " 'auto' or 'unfused', or cp_comm_type to 'all_gather'"
        )
    if kind == "p2p" and torch.cuda.is_available() and attention._widths[0] % 8:
        raise ValueError(
            f"attention_backend={backend!r} in a ring ({setting}) takes heads of a multiple of 8 channels, not of"
            f" {attention._widths[0]}. Set attention_backend to 'auto' or 'unfused'"
        )
    if kind == "all_gather" and backend == "fused" and attention._is_causal:
        raise ValueError(
            f"attention_backend='fused' with {setting} would need cuDNN's masks, whose gradients may be NaN"
            " (pytorch#196678): set cp_comm_type to 'p2p' or 'a2a', or attention_backend to 'flash'"
        )


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
    if host_sync.read_waits(device):
        # Not with torch's constructor, which allocates the whole mask.
        mask = torch.empty(0, dtype=torch.float32, device="cpu").as_subclass(CausalBias)
        mask.variant, mask.seq_len_q, mask.seq_len_kv = CausalVariant.LOWER_RIGHT, queries, keys
        return mask
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, backend: str | None = None, **options: Any
) -> Tensor:
    """Attention of q [sq, b, heads, d] to k [sk, b, groups, d], v [sk, b, groups, dv]: [sq, b, heads, dv], contiguous.

    Grouped queries share their key and value head inside the kernel; nothing is repeated.
    """
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    kernels = [SDPA_KERNELS[backend]] if backend else _NOT_CUDNN if _is_masked_on_gpu(q, options) else None
    with sdpa_kernel(kernels) if kernels else nullcontext():
        context = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **options)
    return context.permute(2, 0, 1, 3).contiguous()


def _is_masked_on_gpu(q: Tensor, options: dict[str, Any]) -> bool:
    return "attn_mask" in options and host_sync.read_waits(q.device)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, packed: Any, scale: float, causal: bool, **options: Any
) -> Tensor:
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
        mask = _causal_mask(q_i, k_i, causal)
        parts.append(_sdpa(q_i, k_i, v_i, scale, **mask, **options).squeeze(1))
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


def _zigzag(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, scale: float, **options: Any
) -> Tensor:
    """Causal attention of this rank's two chunks of queries to the sequence's k and v: [s / cp, b, heads, dv]."""
    rank, size, n = dist.get_rank(group), dist.get_world_size(group), len(q) // 2
    parts = []
    for queries, chunk in zip(q.split(n), (rank, 2 * size - 1 - rank), strict=True):
        visible = (chunk + 1) * n
        mask = _last_queries_mask(n, visible, q.device)
        parts.append(_sdpa(queries, k[:visible], v[:visible], scale, attn_mask=mask, **options))
    return torch.cat(parts)


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

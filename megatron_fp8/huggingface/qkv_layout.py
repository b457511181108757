"""Megatron-Core's fused query-key-value matrix and its three parts; shapes of all tensors.

With grouped queries each key and value head serves several query heads. Megatron-Core orders the output rows
by group, so that a tensor-parallel rank with a contiguous range of rows has whole groups:

    rows of linear_qkv    q0 q1 q2 q3 k0 v0 | q4 q5 q6 q7 k1 v1         8 heads, 2 groups; each letter is
    head_dim rows
    Hugging Face          q0 ... q7,  k0 k1,  v0 v1                     three matrices

The order within a head is the same: with rotary_interleaved=False Megatron-Core rotates the first half of a
head against the second, like rotate_half in transformers. (Meta's original Llama files rotate neighbours;
they are another format.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .architectures import Entry


@dataclass(frozen=True)
class Heads:
    """Attention sizes: query heads, groups (key and value heads), and values per head."""

    heads: int
    groups: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(
                f"{self.heads} attention heads do not divide among {self.groups} groups of keys and values: "
                "num_attention_heads must be a multiple of num_key_value_heads (num_query_groups)."
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows of the query, key and value projections."""
        return self.heads * self.head_dim, self.groups * self.head_dim, self.groups * self.head_dim


def split_qkv(fused: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a fused weight [rows, hidden] or bias [rows]; contiguous copies."""
    rest = fused.shape[1:]
    grouped = fused.reshape(
        heads.groups, -1, heads.head_dim, *rest
    )  # [groups, heads of a group + 2, head_dim, ...]
    query, key, value = grouped.split([heads.heads // heads.groups, 1, 1], dim=1)
    parts = [part.reshape(-1, *rest).contiguous() for part in (query, key, value)]
    return parts[0], parts[1], parts[2]


def join_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: Heads) -> torch.Tensor:
    """The fused weight or bias [rows, ...] from its parts: the inverse of split_qkv."""
    rest = query.shape[1:]
    parts = [part.reshape(heads.groups, -1, heads.head_dim, *rest) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def pad_rows(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """`matrix` padded with rows of zeros to `rows` rows."""
    return torch.cat([matrix, matrix.new_zeros(rows - len(matrix), *matrix.shape[1:])])


def interleave(matrix: torch.Tensor, heads: int, turned: int) -> torch.Tensor:
    """[rows, ...] with the last `turned` rows of each head interleaved: 0 h 1 h+1 ..., h being half of them.

    Megatron-Core's latent attention rotates neighbours, as DeepSeek's weights do; a directory with
    rope_interleave=false rotates the first half against the second.
    """
    grouped = matrix.reshape(heads, -1, *matrix.shape[1:])  # [heads, rows of a head, ...]
    rest, rope = grouped.split([grouped.shape[1] - turned, turned], dim=1)
    pairs = rope.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # [heads, turned, ...]
    return torch.cat([rest, pairs], dim=1).reshape(matrix.shape)


def heads_of(section: dict[str, Any]) -> Heads:
    """Attention sizes of a model section."""
    heads = section["num_attention_heads"]
    groups = section.get("num_query_groups") or heads
    return Heads(heads, groups, section.get("kv_channels") or section["hidden_size"] // heads)


def megatron_shape(entry: Entry, section: dict[str, Any]) -> list[int]:
    """The whole shape of a checkpoint's tensor, with the vocabulary unpadded."""
    shapes = list(part_shapes(entry, section).values())
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]


def part_shapes(entry: Entry, section: dict[str, Any]) -> dict[str, list[int]]:
    """Name -> shape of the Hugging Face tensors that ``entry`` consists of."""
    sizes = _sizes(section)
    rest = [sizes[name] for name in entry.shape[1:]]
    rows = heads_of(section).sizes if entry.qkv else (sizes[entry.shape[0]],)
    return {name: [first, *rest] for name, first in zip(entry.parts, rows, strict=True)}


def _sizes(section: dict[str, Any]) -> dict[str, int]:
    """Values of the size names in architectures.py for this model."""
    hidden, heads = section["hidden_size"], section["num_attention_heads"]
    ffn = section.get("ffn_hidden_size") or 4 * hidden
    found = {
        "vocab": section["vocab_size"],
        "hidden": hidden,
        "two_hidden": 2 * hidden,
        "ffn": ffn,
        "experts": section.get("num_moe_experts") or 0,
        "moe_ffn": section.get("moe_ffn_hidden_size") or ffn,
        "shared_ffn": section.get("moe_shared_expert_intermediate_size") or 0,
    }
    if not section.get("multi_latent_attention"):
        return {**found, "heads": heads_of(section).sizes[0], "head_dim": heads_of(section).head_dim}
    latent, plain, rope = (section[name] for name in ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"))
    return {
        **found,
        "q_rank": section.get("q_lora_rank") or 0,
        "queries": heads * (plain + rope),
        "kv_rank": latent,
        "kv_rank_and_rope": latent + rope,
        "keys_and_values": heads * (plain + section["v_head_dim"]),
        "values": heads * section["v_head_dim"],
    }

"""Megatron-Core's fused query-key-value matrix and its three parts.

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

import torch


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

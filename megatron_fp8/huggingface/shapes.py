"""Shapes that a model section gives to tensors: Megatron-Core's, and those of their parts."""

from __future__ import annotations

from typing import Any

from .architectures import Entry
from .config import heads_of


def megatron_shape(entry: Entry, section: dict[str, Any]) -> list[int]:
    """The whole shape of a checkpoint's tensor; a vocabulary without its padding."""
    first = sum(shape[0] for shape in part_shapes(entry, section).values())
    return [first, *next(iter(part_shapes(entry, section).values()))[1:]]


def part_shapes(entry: Entry, section: dict[str, Any]) -> dict[str, list[int]]:
    """Name -> shape of each of Hugging Face's tensors that ``entry`` is made of."""
    hidden, heads = section["hidden_size"], heads_of(section)
    ffn = section.get("ffn_hidden_size") or 4 * hidden
    query, key, _ = heads.sizes
    shapes = {
        "model.embed_tokens.weight": [section["vocab_size"], hidden],
        "lm_head.weight": [section["vocab_size"], hidden],
        "self_attn.q_proj.weight": [query, hidden],
        "self_attn.k_proj.weight": [key, hidden],
        "self_attn.v_proj.weight": [key, hidden],
        "self_attn.q_proj.bias": [query],
        "self_attn.k_proj.bias": [key],
        "self_attn.v_proj.bias": [key],
        "self_attn.q_norm.weight": [heads.head_dim],
        "self_attn.k_norm.weight": [heads.head_dim],
        "self_attn.o_proj.weight": [hidden, query],
        "mlp.gate_proj.weight": [ffn, hidden],
        "mlp.up_proj.weight": [ffn, hidden],
        "mlp.down_proj.weight": [hidden, ffn],
    }
    return {name: shapes.get(_of_layer(name), [hidden]) for name in entry.parts}


def _of_layer(name: str) -> str:
    """A tensor's name without `model.layers.N.`."""
    return name.split(".", 3)[3] if name.startswith("model.layers.") else name

"""Shapes of Megatron-Core's tensors and of their parts, from a model section."""

from __future__ import annotations

from typing import Any

from .architectures import Entry
from .config import heads_of


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

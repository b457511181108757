"""Rules for the fields of Megatron-Core's MLATransformerConfig."""

from __future__ import annotations

import math
from typing import Any

from .field import Field, refused, works
from .rules import FLAG, FLOAT32, POSITIVE, SIZE, Relation, number, one_of, optional

_MLA = "transformer/multi_latent_attention"
_ON = ("multi_latent_attention",)
_YARN = ("rope_type", "yarn")
_SCALE = number(0, 100)  # with the longest stretch the softmax scale still fits float16

LATENT_FIELDS: dict[str, Field] = {
    "q_lora_rank": works(optional(SIZE), _MLA, *_ON),
    "kv_lora_rank": works(SIZE, _MLA, *_ON),
    "qk_head_dim": works(SIZE, _MLA, *_ON),
    "qk_pos_emb_head_dim": works(SIZE, _MLA, *_ON),
    "v_head_dim": works(SIZE, _MLA, *_ON),
    "rope_type": works(one_of("rope", "yarn"), _MLA, *_ON),
    "rotary_base": works(number(1, FLOAT32, without=[1]), _MLA, *_ON),
    "rotary_percent": works(number(0, 1, without=[0]), _MLA, "rope_type", "rope"),
    # Megatron-Core uses these two in the softmax scale for any rope_type.
    "rotary_scaling_factor": works(number(1, 1e6), _MLA, *_YARN, also="mscale_all_dim"),
    "mscale_all_dim": works(_SCALE, _MLA, *_ON),
    "original_max_position_embeddings": works(SIZE, _MLA, *_YARN),
    "beta_fast": works(POSITIVE, _MLA, *_YARN),
    "beta_slow": works(POSITIVE, _MLA, *_YARN),
    "mscale": works(_SCALE, _MLA, *_YARN),
    "cache_mla_latents": refused(
        "it needs Megatron-Core's dynamic batches and a kernel that those call; megatron_fp8.mcore.generation.Decoder"
        " keeps keys and values without it",
        FLAG,
    ),
}


def _has_yarn(c: Any) -> bool:
    return bool(c.multi_latent_attention and c.rope_type == "yarn")


def stretched_from_and_to(c: Any) -> tuple[int, int]:
    """Returns the indices of a head's frequencies between which YaRN's ramp rises, as Megatron-Core counts and clips
    them.

    Frequencies before the first stay unchanged, those after the second are stretched. Source: YaRN
    (arXiv:2309.00071), section 3.2.
    """
    channels, context = c.qk_pos_emb_head_dim, c.original_max_position_embeddings

    def turning(times: float) -> float:
        return channels * math.log(context / (times * 2 * math.pi)) / (2 * math.log(c.rotary_base))

    return max(math.floor(turning(c.beta_fast)), 0), min(math.ceil(turning(c.beta_slow)), channels - 1)


def _rises(c: Any) -> bool:
    low, high = stretched_from_and_to(c)
    return low <= high


def _rotated_channels(c: Any) -> int:
    """Returns the number of a head's channels that rope_type='rope' rotates, as Megatron-Core counts them."""
    return int(c.qk_pos_emb_head_dim * c.rotary_percent)


LATENT_RELATIONS: tuple[Relation, ...] = (
    Relation(
        ("multi_latent_attention",),
        "its sizes are fields of megatron_fp8.MLATransformerConfig, and TransformerConfig has none:"
        " make the config of that class",
        lambda c: not c.multi_latent_attention or hasattr(c, "kv_lora_rank"),
    ),
    Relation(
        ("qk_pos_emb_head_dim",),
        "rotary positions turn pairs of channels, so it must be even",
        lambda c: not c.multi_latent_attention or c.qk_pos_emb_head_dim % 2 == 0,
    ),
    Relation(
        ("rope_type", "rotary_percent", "qk_pos_emb_head_dim"),
        "rotary positions turn pairs of channels, so that part of qk_pos_emb_head_dim must be even and at least 2",
        lambda c: (
            not c.multi_latent_attention
            or c.rope_type != "rope"
            or (_rotated_channels(c) >= 2 and _rotated_channels(c) % 2 == 0)
        ),
    ),
    Relation(
        ("beta_slow", "beta_fast"),
        "frequencies that turn beta_fast times in the original context stay, and those that turn beta_slow times are"
        " stretched, so beta_slow is at most beta_fast",
        lambda c: not _has_yarn(c) or c.beta_slow <= c.beta_fast,
    ),
    Relation(
        ("rotary_base", "original_max_position_embeddings", "qk_pos_emb_head_dim", "beta_fast", "beta_slow"),
        "all of a head's frequencies would lie on one side of YaRN's ramp, which Megatron-Core then inverts: with"
        " rope_type='rope' nothing is stretched",
        lambda c: not _has_yarn(c) or _rises(c),
    ),
    Relation(
        ("q_lora_rank", "tensor_model_parallel_size"),
        "every tensor parallel rank has an equal part of the down projection's rows",
        lambda c: not c.multi_latent_attention or (c.q_lora_rank or 0) % c.tensor_model_parallel_size == 0,
    ),
    Relation(
        ("kv_lora_rank", "qk_pos_emb_head_dim", "tensor_model_parallel_size"),
        "every tensor parallel rank has an equal part of the rows of the down projection, which are kv_lora_rank +"
        " qk_pos_emb_head_dim",
        lambda c: (
            not c.multi_latent_attention
            or (c.kv_lora_rank + c.qk_pos_emb_head_dim) % c.tensor_model_parallel_size == 0
        ),
    ),
    Relation(
        ("multi_latent_attention", "num_query_groups", "num_attention_heads"),
        "heads share latents there, and no keys and values: leave num_query_groups out",
        lambda c: not c.multi_latent_attention or c.num_query_groups in (None, c.num_attention_heads),
    ),
    Relation(
        ("multi_latent_attention", "qk_l2_norm"),
        "multi-latent attention norms its latents (qk_layernorm), not heads",
        lambda c: not c.multi_latent_attention or not c.qk_l2_norm,
    ),
    Relation(
        ("multi_latent_attention", "attention_output_gate"),
        "Megatron-Core has no output gate for multi-latent attention",
        lambda c: not c.multi_latent_attention or not c.attention_output_gate,
    ),
    Relation(
        ("rope_type", "rotary_interleaved"),
        "YaRN turns halves of a head, not neighbours",
        lambda c: not c.multi_latent_attention or c.rope_type != "yarn" or not c.rotary_interleaved,
    ),
)

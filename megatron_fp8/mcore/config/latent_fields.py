"""The fields that Megatron-Core's MLATransformerConfig adds: what each may be, as mcore/config/table.py has it of the
rest."""

from __future__ import annotations

from .field import Field, refused, works
from .rules import FLAG, NOT_NEGATIVE, POSITIVE, SIZE, Relation, number, one_of, optional

_MLA = "transformer/multi_latent_attention"
_ON = ("multi_latent_attention",)
_YARN = ("rope_type", "yarn")

LATENT_FIELDS: dict[str, Field] = {
    "q_lora_rank": works(optional(SIZE), _MLA, *_ON),
    "kv_lora_rank": works(SIZE, _MLA, *_ON),
    "qk_head_dim": works(SIZE, _MLA, *_ON),
    "qk_pos_emb_head_dim": works(SIZE, _MLA, *_ON),
    "v_head_dim": works(SIZE, _MLA, *_ON),
    "rope_type": works(one_of("rope", "yarn"), _MLA, *_ON),
    "rotary_base": works(POSITIVE, _MLA, *_ON),
    "rotary_percent": works(number(0, 1, without=[0]), _MLA, *_ON),
    "rotary_scaling_factor": works(POSITIVE, _MLA, *_YARN),
    "original_max_position_embeddings": works(SIZE, _MLA, *_YARN),
    "beta_fast": works(POSITIVE, _MLA, *_YARN),
    "beta_slow": works(POSITIVE, _MLA, *_YARN),
    "mscale": works(NOT_NEGATIVE, _MLA, *_YARN),
    "mscale_all_dim": works(NOT_NEGATIVE, _MLA, *_YARN),
    "cache_mla_latents": refused(
        "it needs Megatron-Core's dynamic batches and a kernel that those call; megatron_fp8.mcore.generation.Decoder"
        " keeps keys and values without it",
        FLAG,
    ),
}

LATENT_RELATIONS: tuple[Relation, ...] = (
    Relation(
        ("multi_latent_attention",),
        "its sizes are fields of megatron_fp8.mcore.config.latent.MLATransformerConfig, and TransformerConfig has none:"
        " make the config of that class",
        lambda c: not c.multi_latent_attention or hasattr(c, "kv_lora_rank"),
    ),
    Relation(
        ("qk_pos_emb_head_dim",),
        "rotary positions turn pairs of channels, so it must be even",
        lambda c: not c.multi_latent_attention or c.qk_pos_emb_head_dim % 2 == 0,
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

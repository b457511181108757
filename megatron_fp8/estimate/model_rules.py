"""Rules for the model fields that an estimate reads."""

from __future__ import annotations

from typing import Any

from ..mcore.config.fields import FIELD_RULES
from ..mcore.config.rules import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    PROBABILITY,
    RANKS,
    SIZE,
    Rule,
    either,
    integer,
    list_of,
    one_of,
    optional,
    text,
)
from ..recipe import RECIPES
from ..train.config.field_rules import RULES

_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")

MODEL_RULES: dict[str, Rule] = {
    **dict.fromkeys(("num_layers", "num_attention_heads"), COUNT),
    "hidden_size": SIZE,
    **dict.fromkeys(("num_query_groups", "kv_channels"), optional(COUNT)),
    **dict.fromkeys(
        ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"), optional(SIZE)
    ),
    **dict.fromkeys(
        (
            "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "bias_activation_fusion",
            "activation_func_fp8_input_store", "fp8_param", "fp8_wgrad", "fp8_keep_columnwise", "fp16",
            "first_last_layers_bf16", "sequence_parallel", "moe_shared_expert_gate", "distribute_saved_activations",
            "moe_grouped_gemm", "fp8_output_layer", "multi_latent_attention", "moe_router_pre_softmax",
            "moe_router_enable_expert_bias", "moe_fp8_dispatch",
            "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
            "share_embeddings_and_output_weights",
        ),
        FLAG,
    ),
    "bf16": optional(FLAG),
    "normalization": one_of("LayerNorm", "RMSNorm"),
    "activation_func": one_of("gelu", "silu", "relu", "squared_relu"),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), PROBABILITY),
    "params_dtype": optional(one_of("bfloat16", "float16", "float32")),
    "fp8": optional(one_of("hybrid", "e4m3")),
    "fp8_recipe": optional(one_of(*RECIPES)),
    "fp8_backend": optional(one_of("auto", "emulated", "native", "transformer_engine")),
    **dict.fromkeys(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), integer(0, 2**16, "layers")),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "expert_model_parallel_size"),
        RANKS,
    ),
    "expert_tensor_parallel_size": optional(RANKS),
    **dict.fromkeys(
        ("virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage",
         "num_layers_in_last_pipeline_stage", "microbatch_group_size_per_vp_stage", "recompute_num_layers",
         "num_moe_experts", "mtp_num_layers", "moe_router_num_groups", "moe_router_group_topk"),
        optional(COUNT),
    ),
    "recompute_granularity": optional(one_of("full", "selective")),
    "recompute_method": optional(one_of("uniform", "block")),
    "recompute_modules": optional(list_of(text())),
    "moe_layer_freq": either(COUNT, list_of(integer(0, 1))),
    "moe_router_topk": COUNT,
    "moe_router_dtype": optional(one_of("fp32", "fp64")),
    "moe_router_score_function": one_of("softmax", "sigmoid"),
    "moe_router_load_balancing_type": either(one_of(*_BALANCING, "sinkhorn", "none"), list_of(one_of(*_BALANCING))),
    "moe_aux_loss_coeff": either(NOT_NEGATIVE, list_of(NOT_NEGATIVE)),
    "moe_z_loss_coeff": optional(NOT_NEGATIVE),
    **{name: FIELD_RULES[name] for name in (
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    )},
    **{name: RULES["model"][name] for name in (
        "vocab_size", "make_vocab_size_divisible_by", "padded_vocab_size", "position_embedding_type",
        "share_embeddings_and_output_weights",
    )},
}  # fmt: skip

UNKNOWN_SHAPES: dict[str, Any] = {
    "pipeline_model_parallel_layout": None,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "moe_latent_size": None,
    "heterogeneous_block_specs": False,
    "experimental_attention_variant": None,
}
"""Fields that change shapes or layouts in unsupported ways, and their only accepted values."""

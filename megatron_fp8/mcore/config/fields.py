"""Rules for config fields: valid values, refused fields, and relations between fields.

Only fields that this package reads, that FP8 changes, or that Megatron-Core 0.16.1 accepts and the layers here would
ignore or compute wrongly. Megatron-Core validates the others. Nothing here imports Megatron-Core: `megatron-fp8
estimate` reads these tables on machines without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...backends import BACKENDS, LAYER_BACKENDS
from ...plan.settings import FP4_OPTIONS, FP8_FORMATS
from ...recipe import RECIPES
from ...state.fp8_state import FAST_ACCUMULATION
from ...state.guard import LADDERS
from .rules import (
    ANY_NUMBER,
    COUNT,
    FLAG,
    FLOAT32,
    LEAST,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    RANKS,
    SIZE,
    Relation,
    Rule,
    either,
    integer,
    list_of,
    number,
    one_of,
    optional,
    text,
)

_HALF = 65504.0  # float16's largest number: torch raises for a larger one if it computes in float16
_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")
_SCALE = number(0, 100)  # with the longest stretch the softmax scale still fits float16
_RECIPE = Rule(
    f"one of {', '.join(map(repr, RECIPES))}", lambda v: getattr(v, "name", v) in RECIPES, tuple(RECIPES)
)

FIELD_RULES: dict[str, Rule] = {
    # ---- sizes
    **dict.fromkeys(("num_layers", "num_attention_heads", "moe_router_topk"), COUNT),
    **dict.fromkeys(
        ("hidden_size", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
         "original_max_position_embeddings"),
        SIZE,
    ),
    **dict.fromkeys(
        ("num_query_groups", "kv_channels", "virtual_pipeline_model_parallel_size",
         "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
         "microbatch_group_size_per_vp_stage", "recompute_num_layers", "num_moe_experts", "mtp_num_layers",
         "moe_router_num_groups", "moe_router_group_topk"),
        optional(COUNT),
    ),
    **dict.fromkeys(
        ("ffn_hidden_size", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "q_lora_rank"),
        optional(SIZE),
    ),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "expert_model_parallel_size"),
        RANKS,
    ),
    "expert_tensor_parallel_size": optional(RANKS),
    "moe_layer_freq": either(COUNT, list_of(integer(0, 1))),
    # ---- numbers: one that float32 takes for 0 or infinity ends a training after its start
    "layernorm_epsilon": number(LEAST, 1),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), PROBABILITY),
    **dict.fromkeys(("softmax_scale", "activation_func_clamp_value"), optional(number(LEAST, _HALF))),
    "glu_linear_offset": number(-_HALF, _HALF),
    "init_method_std": number(0, 1e3),
    "embedding_init_method_std": optional(number(0, 1e3)),
    "mtp_loss_scaling_factor": NOT_NEGATIVE,
    "moe_router_topk_scaling_factor": optional(POSITIVE),
    "moe_router_bias_update_rate": NOT_NEGATIVE,
    "moe_aux_loss_coeff": either(NOT_NEGATIVE, list_of(NOT_NEGATIVE)),
    "moe_z_loss_coeff": optional(NOT_NEGATIVE),
    "moe_input_jitter_eps": optional(number(0, 1, without=[1])),
    "moe_expert_capacity_factor": optional(ANY_NUMBER),
    "rotary_base": number(1, FLOAT32, without=[1]),
    "rotary_percent": number(0, 1, without=[0]),
    "rotary_scaling_factor": number(1, 1e6),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _SCALE),
    **dict.fromkeys(("beta_fast", "beta_slow"), POSITIVE),
    # ---- names
    "normalization": one_of("LayerNorm", "RMSNorm"),
    "attention_backend": one_of("auto", "flash", "fused", "unfused", "local"),
    "cp_comm_type": optional(one_of("all_gather", "p2p", "a2a")),  # 'a2a+p2p' needs groups of two levels
    "rope_type": one_of("rope", "yarn"),
    "moe_router_dtype": optional(one_of("fp32", "fp64")),
    "moe_router_load_balancing_type": either(
        one_of(*_BALANCING, "sinkhorn", "none"), list_of(one_of(*_BALANCING))
    ),
    # ---- FP8
    "fp8": optional(one_of(*FP8_FORMATS)),
    "fp8_recipe": optional(_RECIPE),
    **dict.fromkeys(
        ("fp8_param", "fp4_param", "fp8_wgrad", "first_last_layers_bf16", "tp_only_amax_red",
         "activation_func_fp8_input_store", "moe_grouped_gemm"),
        FLAG,
    ),
    **dict.fromkeys(("fp8_quantizer_factory", "fp4_quantizer_factory"), optional(text("the import path of a callable"))),
    "fp4": optional(one_of("e2m1")),
    "fp4_recipe": Rule(
        "'nvfp4' or 'custom' (FP8 recipes for parts of an FP4 model are fp8_overrides)",
        lambda v: getattr(v, "name", v) in ("nvfp4", "custom"),
        ("nvfp4", "custom"),
    ),
    "fp8_margin": integer(0, 2**6, "powers of two"),
    "fp8_interval": integer(1, 2**31 - 1, "iterations"),
    "fp8_amax_history_len": integer(1, 2**16, "iterations"),
    "fp8_amax_compute_algo": one_of("most_recent", "max"),
    **dict.fromkeys(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), integer(0, 2**16, "layers")),
}  # fmt: skip
"""Rules for Megatron-Core's fields that this package checks."""

OWN_RULES: dict[str, Rule] = {
    "fp8_backend": optional(  # a program may add its own
        replace(
            one_of("auto", *BACKENDS, *LAYER_BACKENDS),
            holds=lambda v: v in ("auto", *BACKENDS, *LAYER_BACKENDS),
        )
    ),
    "fp8_fallback": one_of("error", "warn"),
    **dict.fromkeys(("fp8_high_precision_warmup", "fp8_high_precision_healing"), number(0, 1)),
    "fp8_high_precision_healing_parts": optional(list_of(text("a linear or GEMM, such as '*:fprop'"))),
    "fp8_amax_epsilon": NOT_NEGATIVE,
    "fp8_pow2_scales": optional(FLAG),
    "fp8_stochastic_rounding": FLAG,
    **dict.fromkeys((f"fp4_{name}" for name in FP4_OPTIONS), FLAG),
    "fp8_fast_accumulation": one_of(*FAST_ACCUMULATION),
    "fp8_keep_columnwise": FLAG,
    "fp8_output_layer": FLAG,
    "moe_fp8_dispatch": FLAG,
    "fp8_size_filter": optional(text("the path of a table that `megatron-fp8 bench --tune` wrote")),
    "fp8_size_filter_tokens": optional(integer(1, 2**40, "tokens of a microbatch")),
    "fp8_guard": either(FLAG, one_of(*LADDERS)),
    "fp8_guard_patience": integer(1, 2**31 - 1, "iterations in a row"),
}
"""Rules for this package's own fields, as far as they concern one value."""

_OWN_GRAPHS = (
    "Megatron-Core's CUDA graphs update FP8 through Transformer Engine, and a replay would skip the host's part of an"
    " iteration. Use train.cuda_graphs of megatron-fp8 train, or capture the step yourself, with"
    " megatron_fp8.state.cuda_graph.CapturedStep (docs/performance.md)"
)
_ATTENTION_IN_BF16 = (
    "attention itself runs in BF16, as in DeepSeek-V3:"
    " PyTorch's scaled_dot_product_attention does not support FP8"
)
_OTHER_FP8 = "these layers have another FP8, and the layers here would ignore it"
_NO_LOGITS = "attention here does not keep its largest logits"

REFUSED: dict[str, str] = {
    "fp8_dot_product_attention": _ATTENTION_IN_BF16,
    "fp8_multi_head_attention": _ATTENTION_IN_BF16,
    **dict.fromkeys(("use_kitchen", "use_kitchen_attention", "quant_recipe"), _OTHER_FP8),
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl"), _OWN_GRAPHS),
    "heterogeneous_block_specs": "layers of this config are all of one shape",
    **dict.fromkeys(("qk_clip", "log_max_attention_logit"), _NO_LOGITS),
    "experimental_attention_variant": "attention here is plain, and would be computed instead",
    "hierarchical_context_parallel_sizes": "context parallelism here has one level",
    "hybrid_context_parallel": "it needs packed sequences, which context parallel attention here does not take",
    "fp32_residual_connection": "the layers here take their input in params_dtype alone",
    "overlap_moe_expert_parallel_comm": "its schedule needs Transformer Engine's layers",
    "cache_mla_latents": (
        "it needs Megatron-Core's dynamic batches and a kernel that those call;"
        " megatron_fp8.mcore.generation.Decoder keeps keys and values without it"
    ),
}
"""Fields that must stay at their default -> why. Megatron-Core accepts them, and the layers here would ignore them."""


def _stages(c: Any) -> int:
    """Returns the number of parts into which the layers are split."""
    return c.pipeline_model_parallel_size * (c.virtual_pipeline_model_parallel_size or 1)


def _is_evenly_split(c: Any) -> bool:
    return not (
        c.pipeline_model_parallel_layout
        or c.num_layers_in_first_pipeline_stage
        or c.num_layers_in_last_pipeline_stage
        or c.account_for_embedding_in_pipeline_split
        or c.account_for_loss_in_pipeline_split
    )


def _routes_by_group(c: Any) -> bool:
    return bool(c.num_moe_experts and c.moe_router_group_topk and c.moe_router_num_groups)


def _activations_dtype(c: Any) -> Any:
    import torch

    return torch.bfloat16 if c.bf16 else torch.float16 if c.fp16 else c.params_dtype


def _rotated_channels(c: Any) -> int:
    """Returns the number of a head's channels that rope_type='rope' rotates, as Megatron-Core counts them."""
    return int(c.qk_pos_emb_head_dim * c.rotary_percent)


def _has_equal_parts(name: str) -> Relation:
    return Relation(
        (name, "tensor_model_parallel_size"),
        f"every tensor parallel rank has an equal part of {name}",
        lambda c: (getattr(c, name) or 0) % c.tensor_model_parallel_size == 0,
    )


SILENT: tuple[Relation, ...] = (
    Relation(  # two stages are each other's next and previous one; batched messages are matched by order alone
        (
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_size",
            "overlap_p2p_comm",
            "batch_p2p_comm",
        ),
        "two interleaved stages need overlap_p2p_comm=True and batch_p2p_comm=False, or Megatron-Core silently swaps"
        " activations and gradients between them",
        lambda c: (
            not c.virtual_pipeline_model_parallel_size
            or c.pipeline_model_parallel_size != 2
            or (c.overlap_p2p_comm and not c.batch_p2p_comm)
        ),
    ),
    Relation(
        ("activation_func_fp8_input_store", "bias_activation_fusion"),
        "Megatron-Core stores the activation's input in FP8 only with bias_activation_fusion=True",
        lambda c: c.bias_activation_fusion or not c.activation_func_fp8_input_store,
    ),
)
"""Relations that plain Megatron-Core ignores or violates silently: a warning when FP8 is off."""


def _bf16_masters(name: str) -> Relation:
    return Relation(
        (name, "bf16", "fp16"),
        f"masters are rounded to BF16 before they are cast: {name}=True needs bf16=True and"
        f" params_dtype=torch.bfloat16; or set {name}=False",
        lambda c: c.bf16 or not getattr(c, name),
    )


RELATIONS: tuple[Relation, ...] = (
    *SILENT,
    Relation(
        ("sequence_parallel", "tensor_model_parallel_size"),
        "sequence parallelism splits the sequence among tensor parallel ranks, of which there must be more than one; with"
        " one, sequence_parallel=False",
        lambda c: not c.sequence_parallel or c.tensor_model_parallel_size > 1,
    ),
    Relation(
        ("hidden_size", "num_attention_heads", "kv_channels"),
        "without kv_channels, every head has an equal part of hidden_size",
        lambda c: c.kv_channels is not None or c.hidden_size % c.num_attention_heads == 0,
    ),
    Relation(
        ("num_attention_heads", "num_query_groups"),
        "num_attention_heads must be a multiple of num_query_groups",
        lambda c: c.num_query_groups is None or c.num_attention_heads % c.num_query_groups == 0,
    ),
    *map(_has_equal_parts, ("hidden_size", "num_attention_heads", "ffn_hidden_size")),
    Relation(
        ("num_query_groups", "tensor_model_parallel_size"),
        "one must be a multiple of the other",
        lambda c: (
            c.num_query_groups is None
            or c.num_query_groups % c.tensor_model_parallel_size == 0
            or c.tensor_model_parallel_size % c.num_query_groups == 0
        ),
    ),
    Relation(
        ("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_size"),
        "virtual stages need a pipeline of more than one stage",
        lambda c: (c.virtual_pipeline_model_parallel_size or 1) == 1 or c.pipeline_model_parallel_size > 1,
    ),
    Relation(
        ("num_layers", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        "every stage has an equal number of layers, unless another split is given (pipeline_model_parallel_layout)",
        lambda c: not _is_evenly_split(c) or c.num_layers % _stages(c) == 0,
    ),
    Relation(
        ("pipeline_model_parallel_size", "pipeline_dtype", "bf16", "fp16"),
        "stages exchange activations in pipeline_dtype, which must be the activations' dtype",
        lambda c: c.pipeline_model_parallel_size == 1 or c.pipeline_dtype in (None, _activations_dtype(c)),
    ),
    _bf16_masters("fp8_param"),
    _bf16_masters("fp4_param"),
    Relation(
        ("recompute_granularity", "recompute_method", "recompute_num_layers", "num_layers"),
        "the layers of a stage are recomputed in equal parts of recompute_num_layers",
        lambda c: (
            not (c.recompute_granularity == "full" and c.recompute_method == "uniform")
            or not (_is_evenly_split(c) and c.recompute_num_layers)
            or (c.num_layers // _stages(c)) % c.recompute_num_layers == 0
        ),
    ),
    Relation(
        ("moe_router_topk", "num_moe_experts"),
        "a token goes to at most as many experts as there are",
        lambda c: not c.num_moe_experts or c.moe_router_topk <= c.num_moe_experts,
    ),
    Relation(
        ("num_moe_experts", "expert_model_parallel_size"),
        "every expert parallel rank has an equal number of experts",
        lambda c: not c.num_moe_experts or c.num_moe_experts % c.expert_model_parallel_size == 0,
    ),
    Relation(
        ("num_moe_experts", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk"),
        "experts are in equal groups, moe_router_group_topk of which are chosen, and from each an equal number of experts"
        " that it has",
        lambda c: (
            not _routes_by_group(c)
            or (
                c.num_moe_experts % c.moe_router_num_groups == 0
                and c.moe_router_group_topk <= c.moe_router_num_groups
                and c.moe_router_topk % c.moe_router_group_topk == 0
                and c.moe_router_topk // c.moe_router_group_topk
                <= c.num_moe_experts // c.moe_router_num_groups
            )
        ),
    ),
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
        lambda c: not c.multi_latent_attention or c.rope_type != "yarn" or c.beta_slow <= c.beta_fast,
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
)
"""Relations of sizes and layouts that every reader of a config relies on, and those that fail silently."""

"""Relations between several fields of a TransformerConfig, as data."""

from __future__ import annotations

from typing import Any

from .rules import Relation


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


STAGES_SWAPPED = Relation(
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
)
"""Two stages are each other's next and previous one; batched messages between them are matched by order alone."""

INPUT_STORED = Relation(
    ("activation_func_fp8_input_store", "bias_activation_fusion"),
    "Megatron-Core stores the activation's input in FP8 only with bias_activation_fusion=True",
    lambda c: c.bias_activation_fusion or not c.activation_func_fp8_input_store,
)

SILENT = (STAGES_SWAPPED, INPUT_STORED)
"""Relations that plain Megatron-Core ignores or violates silently: a warning when FP8 is off."""

RELATIONS: tuple[Relation, ...] = (
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
    Relation(
        ("num_attention_heads", "tensor_model_parallel_size"),
        "every tensor parallel rank has an equal number of heads",
        lambda c: c.num_attention_heads % c.tensor_model_parallel_size == 0,
    ),
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
        ("ffn_hidden_size", "tensor_model_parallel_size"),
        "every tensor parallel rank has an equal part of ffn_hidden_size",
        lambda c: c.ffn_hidden_size is None or c.ffn_hidden_size % c.tensor_model_parallel_size == 0,
    ),
    Relation(
        ("hidden_size", "tensor_model_parallel_size"),
        "every tensor parallel rank has an equal part of hidden_size",
        lambda c: c.hidden_size % c.tensor_model_parallel_size == 0,
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
    STAGES_SWAPPED,
    INPUT_STORED,
    Relation(
        ("fp8_param", "bf16", "fp16"),
        "masters are rounded to BF16 before they are cast to FP8: fp8_param=True needs bf16=True and"
        " params_dtype=torch.bfloat16; or set fp8_param=False",
        lambda c: c.bf16 or not c.fp8_param,
    ),
    Relation(
        ("bf16", "params_dtype"),
        "the parameters of a BF16 model are bfloat16, or float32 before they are converted",
        lambda c: not c.bf16 or str(c.params_dtype) != "torch.float16",
    ),
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
        ("window_attn_skip_freq", "num_layers"),
        "a list has one entry for each layer",
        lambda c: (
            not isinstance(c.window_attn_skip_freq, list) or len(c.window_attn_skip_freq) == c.num_layers
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
        ("moe_router_group_topk", "moe_router_num_groups"),
        "groups are chosen among moe_router_num_groups, which has to be given",
        lambda c: not c.moe_router_group_topk or bool(c.moe_router_num_groups),
    ),
    Relation(
        ("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
        "several kinds of loss have a list of coefficients, one for each, and one kind has a number",
        lambda c: (
            not c.num_moe_experts
            or isinstance(c.moe_router_load_balancing_type, list) == isinstance(c.moe_aux_loss_coeff, list)
        ),
    ),
    Relation(
        (
            "moe_router_load_balancing_type",
            "moe_aux_loss_coeff",
            "moe_router_score_function",
            "moe_router_enable_expert_bias",
            "moe_router_group_topk",
        ),
        "Megatron-Core's Sinkhorn routing has no auxiliary loss (a coefficient of 0), no scores but softmax's, no bias of"
        " experts and no groups",
        lambda c: (
            not c.num_moe_experts
            or c.moe_router_load_balancing_type != "sinkhorn"
            or not (
                c.moe_aux_loss_coeff
                or c.moe_router_score_function != "softmax"
                or c.moe_router_enable_expert_bias
                or c.moe_router_group_topk
            )
        ),
    ),
    Relation(
        ("moe_apply_probs_on_input", "moe_router_topk"),
        "probabilities on the input need moe_router_topk=1",
        lambda c: not (c.num_moe_experts and c.moe_apply_probs_on_input) or c.moe_router_topk == 1,
    ),
)

"""Layouts, recipes and models that estimates are held against."""

from __future__ import annotations

from typing import Any

from tests.support.estimates import GELU, TINY

ONE = {"model__tensor_model_parallel_size": 1, "model__sequence_parallel": False}
TWO = {"model__tensor_model_parallel_size": 2, "model__sequence_parallel": False}
BOTH = {"model__tensor_model_parallel_size": 2, "model__sequence_parallel": True}
DISTRIBUTED = {"optimizer__use_distributed_optimizer": True}
PIPELINE = {**ONE, "model__pipeline_model_parallel_size": 2}
FP8 = {"model__fp8_param": True}
FP4 = {"model__fp8": None, "model__fp4": "e2m1"}
OUTPUT = {"model__fp8_output_layer": True}
MOE = {
    "model__num_moe_experts": 4,
    "model__moe_ffn_hidden_size": 256,
    "model__moe_router_load_balancing_type": "none",
    "model__moe_token_dispatcher_type": "alltoall",
}
LATENT = {
    "model__multi_latent_attention": True,
    "model__num_query_groups": None,
    "model__kv_channels": None,
    "model__qk_layernorm": True,
    "model__q_lora_rank": 128,
    "model__kv_lora_rank": 96,
    "model__qk_head_dim": 32,
    "model__qk_pos_emb_head_dim": 32,
    "model__v_head_dim": 64,
}
MTP = {"model__mtp_num_layers": 1}
THREE = {"model__num_layers": 3}  # the least with one in FP8 between the first and the last
PAIR = {"train__global_batch_size": 2}  # two microbatches, without data parallelism
SHORT = {**THREE, **PAIR}
BIASED = {
    "model__moe_router_score_function": "sigmoid",
    "model__moe_router_enable_expert_bias": True,
    "model__moe_router_num_groups": 2,
    "model__moe_router_group_topk": 1,
    "model__moe_router_load_balancing_type": "seq_aux_loss",
    "model__moe_aux_loss_coeff": 1e-4,
    "model__moe_router_dtype": "fp32",
    "model__moe_shared_expert_intermediate_size": 256,
}

# Title -> (ranks, shipped config, changes). Each recipe, fp8_param, optimizer and kind of layout is in one of these.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "FP8 output layer, tied over stages, fp8_param": (4, GELU, {
        **PIPELINE, **DISTRIBUTED, **FP8, **OUTPUT, "model__fp8_format": "blockwise",
    }),
    "tensorwise, fp8_param, sharded": (4, TINY, {**BOTH, **DISTRIBUTED, **FP8, **THREE}),
    "mxfp8, fp8_param, sharded, three tokens predicted": (2, TINY, {
        **ONE, **DISTRIBUTED, **FP8, **THREE, "model__mtp_num_layers": 2, "model__fp8_format": "mxfp8",
    }),
    "nvfp4, fp4_param, sharded": (2, TINY, {**ONE, **DISTRIBUTED, **FP4, **THREE, "model__fp4_param": True}),
    "rowwise, fp8_param, buffer apart": (2, TINY, {
        **ONE, **DISTRIBUTED, **FP8, **THREE, "model__fp8_format": "rowwise",
        "optimizer__reuse_grad_buf_for_mxfp8_param_ag": False,
    }),
    "delayed, interleaved, compact": (4, TINY, {
        **PIPELINE, **DISTRIBUTED, **FP8, "model__virtual_pipeline_model_parallel_size": 2,
        "model__fp8_format": "delayed", "optimizer__state_dtype": "fp8",
        "optimizer__overlap_grad_reduce": True,
    }),
    "BF16, uneven stages, odd widths": (4, TINY, {
        **PIPELINE, **DISTRIBUTED, "model__fp8": None, "model__num_layers_in_first_pipeline_stage": 1,
        "model__ffn_hidden_size": 510, "model__qk_layernorm": True,
    }),
    "FP32": (2, TINY, {**ONE, **DISTRIBUTED, **THREE, "model__fp8": None, "model__bf16": False}),
    "context parallel, mixed": (4, TINY, {
        **TWO, **DISTRIBUTED, **FP8, "model__context_parallel_size": 2, **SHORT,
        "model__fp8_format": "tensorwise",
        "model__fp8_overrides": "{'*.linear_fc1': bf16, '*.linear_proj': blockwise}",
    }),
    "context parallel, a ring, core attention recomputed": (2, TINY, {
        **ONE, **PAIR, "model__context_parallel_size": 2, "model__cp_comm_type": "p2p",
        "model__num_query_groups": 2, "model__recompute_granularity": "selective",
        "model__recompute_modules": "[core_attn]",
    }),
    "context parallel, by heads": (2, TINY, {
        **ONE, **PAIR, "model__context_parallel_size": 2, "model__cp_comm_type": "a2a",
    }),
    "nvfp4, gathered codes, FP8 backward of some, weights in MXFP8 of others": (4, TINY, {
        **BOTH, **DISTRIBUTED, **SHORT, **FP4,
        "model__fp8_overrides": "{'*.linear_fc1:dgrad': mxfp8, '*.linear_fc2': tensorwise}",
    }),
    "nvfp4, odd widths, columnwise codes made again": (2, TINY, {
        **BOTH, **FP4, **SHORT, "model__ffn_hidden_size": 504, "model__fp8_keep_columnwise": False,
    }),
    "nvfp4, 1x16 weights, shards not aligned": (2, TINY, {
        **BOTH, **FP4, **SHORT, "model__fp4_disable_2d_quantization": True, "train__seq_length": 36,
    }),
    "rowwise, gathered codes": (4, TINY, {
        **BOTH, **DISTRIBUTED, **FP8, **THREE, "model__fp8_format": "rowwise",
    }),
    "blockwise, shards not aligned": (2, GELU, {
        **FP8, **SHORT, "model__fp8_format": "blockwise", "train__seq_length": 64,
    }),
    "mxfp8, stages, tied, gathered, FP8 output layer": (4, GELU, {
        **PAIR, **OUTPUT, "model__pipeline_model_parallel_size": 2, "model__fp8_format": "mxfp8",
    }),
    "blockwise, gathered, recomputed": (2, TINY, {
        **PAIR, "model__fp8_format": "blockwise", "train__seq_length": 256,
        "model__recompute_granularity": "full", "model__recompute_method": "uniform",
        "model__recompute_num_layers": 2,
    }),
    "experts, a shared one, tensor parallel": (4, TINY, {
        **BOTH, **MOE, **THREE, "model__expert_model_parallel_size": 2,
        "model__expert_tensor_parallel_size": 1, "model__moe_shared_expert_intermediate_size": 256,
        "model__moe_router_dtype": "fp32", "model__fp8_format": "tensorwise",
    }),
    "latent attention, gathered codes, no latent of queries": (2, TINY, {
        **LATENT, **FP8, **SHORT, "model__q_lora_rank": None, "model__fp8_format": "rowwise",
        "train__seq_length": 256,
    }),
    "two tokens predicted, tied over stages": (4, GELU, {
        **PIPELINE, **DISTRIBUTED, **MTP, **OUTPUT, "model__position_embedding_type": "rope",
    }),
    "latent attention, experts, two tokens, all layouts": (4, TINY, {
        **BOTH, **MOE, **BIASED, **LATENT, **MTP, **DISTRIBUTED, **PAIR,
        "model__pipeline_model_parallel_size": 2, "model__expert_model_parallel_size": 2,
        "model__expert_tensor_parallel_size": 1, "model__moe_layer_freq": [0, 1, 1, 1],
        "model__num_moe_experts": 16, "model__moe_ffn_hidden_size": 128, "model__moe_grouped_gemm": True,
        "model__moe_fp8_dispatch": True, "model__fp8_format": "blockwise",
    }),
}  # fmt: skip

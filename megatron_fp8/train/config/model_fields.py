"""Model fields in a checkpoint: which of them a resuming run may change.

    SHAPE       tensors, their sizes and their division into heads: never
    FUNCTION    the computed function: only if the user accepts the field by name (such as a longer context)
    the rest    how it is computed, how exactly, how fast, and how it is trained: allowed, and reported in a line

A field that is in no table counts as FUNCTION, so a new field of Megatron-Core is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...plan.settings import without_fp8_format


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHAPE = _names(
    """
    num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size
    share_embeddings_and_output_weights gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm normalization
    num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_latent_size moe_router_enable_expert_bias mtp_num_layers
    multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    attention_output_gate experimental_attention_variant
    dsa_indexer_n_heads dsa_indexer_head_dim linear_attention_freq linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
    is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads heterogeneous_block_specs
    """
)

FUNCTION = _names(
    """
    position_embedding_type rotary_percent rotary_base rope_scaling rope_scaling_factor rotary_interleaved
    no_rope_freq mrope_section
    rope_type rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    layernorm_epsilon layernorm_zero_centered_gamma apply_residual_connection_post_layernorm qk_l2_norm
    activation_func activation_func_clamp_value glu_linear_offset
    softmax_scale softmax_type window_size window_attn_skip_freq apply_query_key_layer_scaling
    dsa_indexer_topk
    moe_router_topk moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices moe_router_load_balancing_type
    moe_router_force_load_balancing moe_apply_probs_on_input
    moe_token_dropping moe_token_drop_policy moe_expert_capacity_factor moe_pad_expert_input_to_capacity
    """
)

FREE = _names(
    """
    vocab_size make_vocab_size_divisible_by padded_vocab_size

    tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    pipeline_model_parallel_layout pipeline_model_parallel_comm_backend num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    microbatch_group_size_per_vp_stage mtp_standalone sequence_parallel context_parallel_size
    hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel cp_comm_type
    expert_model_parallel_size expert_tensor_parallel_size moe_extended_tp hetereogenous_dist_checkpoint

    fp8 fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
    fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 activation_func_fp8_input_store
    fp8_backend fp8_fallback fp8_overrides fp8_amax_epsilon fp8_pow2_scales fp8_stochastic_rounding
    fp8_fast_accumulation fp8_size_filter fp8_size_filter_tokens fp8_high_precision_warmup fp8_high_precision_healing
    fp8_high_precision_healing_parts fp8_guard fp8_guard_patience fp8_keep_columnwise fp8_output_layer moe_fp8_dispatch
    fp4 fp4_recipe fp4_param fp4_quantizer_factory fp4_disable_rht fp4_disable_stochastic_rounding
    fp4_disable_2d_quantization use_kitchen use_kitchen_attention kitchen_attention_backend
    moe_router_padding_for_quantization moe_router_padding_for_fp8

    bf16 fp16 params_dtype pipeline_dtype enable_autocast autocast_dtype fp32_residual_connection
    attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul moe_router_dtype

    hidden_dropout attention_dropout moe_input_jitter_eps moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_bias_update_rate mtp_loss_scaling_factor dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
    calculate_per_token_loss qk_clip qk_clip_alpha qk_clip_threshold variable_seq_lengths init_method_std
    embedding_init_method_std perform_initialization use_cpu_initialization init_model_with_meta_device
    use_te_rng_tracker

    transformer_impl attention_backend deterministic_mode batch_invariant_mode
    num_microbatches_with_partial_activation_checkpoints gradient_accumulation_fusion
    async_tensor_model_parallel_allreduce tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
    tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend
    overlap_moe_expert_parallel_comm delay_wgrad_compute ep_overlap_early_attn_memory_release overlap_p2p_comm
    batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs defer_embedding_wgrad_compute
    wgrad_deferral_limit overlap_p2p_comm_warmup_flush barrier_with_L1_time cpu_offloading cpu_offloading_num_layers
    cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size cross_entropy_loss_fusion
    cross_entropy_fusion_impl bias_activation_fusion masked_softmax_fusion persist_layer_norm
    memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion use_te_activation_func
    use_fused_weighted_squared_relu fused_single_qkv_rope clone_scatter_output_in_embedding
    disable_parameter_transpose_cache recompute_granularity recompute_method recompute_num_layers
    distribute_saved_activations recompute_modules moe_layer_recompute moe_grouped_gemm moe_use_legacy_grouped_gemm
    moe_shared_expert_overlap moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend
    moe_deepep_num_sms moe_hybridep_num_sms moe_permute_fusion moe_router_fusion moe_per_layer_logging
    moe_enable_routing_replay enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps use_mamba_mem_eff_path
    config_logger_dir test_mode log_max_attention_logit flash_decode inference_rng_tracker inference_sampling_seed
    symmetric_ar_type use_inference_optimized_layers inference_fuse_tp_communication mlp_chunks_for_prefill
    cache_mla_latents
    """
)
"""Sizes of the vocabulary (rows beyond the tokenizer's ids are padding; the tensors' shapes have their number), then
layout, recipe, precision, training and engine."""

IMPORT_PATHS = ("fp8_quantizer_factory", "fp4_quantizer_factory")
"""Fields that name code: they are used only if the user sets them, never from a checkpoint."""


def known_fields() -> frozenset[str]:
    """Every field of a model section that is in a table here."""
    return SHAPE | FUNCTION | FREE


def kind_of(name: str) -> str:
    """'shape', 'function' or 'free'. A field in no table is 'function'."""
    return "shape" if name in SHAPE else "free" if name in FREE else "function"


def comparable_section(section: Mapping[str, Any]) -> dict[str, Any]:
    """A model section in a comparable form: with Megatron-Core's derived values and one name for each setting."""
    result = {name: list(value) if isinstance(value, tuple) else value for name, value in section.items()}
    result = without_fp8_format(result)
    heads, hidden = result.get("num_attention_heads"), result.get("hidden_size")
    derived = {"num_query_groups": heads}
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        derived |= {"kv_channels": hidden // heads, "ffn_hidden_size": 4 * hidden}
    for name, value in derived.items():
        if result.get(name) is None:
            result[name] = value
    if result.get("num_moe_experts"):
        if result.get("moe_ffn_hidden_size") is None:
            result["moe_ffn_hidden_size"] = result.get("ffn_hidden_size")
        every, layers = result.get("moe_layer_freq"), result.get("num_layers")
        if isinstance(every, int) and isinstance(layers, int) and every > 0:
            result["moe_layer_freq"] = [int(layer % every == 0) for layer in range(layers)]
    return result


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Field -> (there, here) for each difference between two model sections, in the order of ``now``.

    Args:
        before, now: model sections of a checkpoint and of the run that reads it.
        defaults: values of fields that one of them lacks. A field that only ``before`` has, with None or False, is no
            difference.
    """
    there, here = comparable_section({**defaults, **before}), comparable_section({**defaults, **now})
    return {
        name: (there.get(name), here.get(name))
        for name in [*here, *(name for name in there if name not in here)]
        if there.get(name) != here.get(name) and not (name not in here and there[name] in (None, False))
    }

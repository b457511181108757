"""The table of all TransformerConfig fields: rules, and their effect here.

A field has its effect (`where` is the file that reads it), has it only together with another field, has no effect
(setting it gives a warning), or is unavailable (setting it is an error). mcore/config/field_checks.py reads the table. A
test compares it with the dataclass, and field_checks.py refuses a set field that is not in it.
"""

from __future__ import annotations

from ...plan.settings import FP8_FORMATS
from ...state.guard import LADDERS
from .. import environment as compat
from .field import Field, ignored, refused, te_function, te_layers, works
from .rules import (
    ANY_NUMBER,
    ANYTHING,
    COUNT,
    FLAG,
    LEAST,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    RANKS,
    SIZE,
    Rule,
    either,
    folder_or_none,
    integer,
    list_of,
    number,
    one_of,
    optional,
    text,
)
from .special_fields import DTYPE, FUNCTION, LAYOUT, PATTERN, RECIPE, SCOPE

_HALF = 65504.0  # float16's largest number: torch raises for a larger one if it computes in float16
_CP_COMM = one_of("p2p", "all_gather", "a2a", "a2a+p2p")
_OWN_GRAPHS = (
    "Megatron-Core's CUDA graphs update FP8 through Transformer Engine, and a replay would skip the host's part of an"
    " iteration. Capture the step yourself, with megatron_fp8.state.graph.CapturedStep (docs/performance.md)"
)
_SAVE_ON_CPU = (
    "wrap layers in torch.autograd.graph.save_on_cpu(), which keeps FP8 codes as they are, or recompute"
)
_ATTENTION_IN_BF16 = (
    "attention itself runs in BF16, as in DeepSeek-V3:"
    " PyTorch's scaled_dot_product_attention does not support FP8"
)
_LOCAL = "the layers here are Megatron-Core's own with this package's GEMMs"

# Files that read fields, under megatron/core unless they begin with megatron_fp8.
_BLOCK, _LAYER = "transformer/transformer_block", "transformer/transformer_layer"
_ATTENTION, _SDPA, _MLP = "transformer/attention", "transformer/dot_product_attention", "transformer/mlp"
_ROUTER, _EXPERTS, _MOE = "transformer/moe/router", "transformer/moe/experts", "transformer/moe/moe_layer"
_DISPATCHER = "transformer/moe/token_dispatcher"
_PP, _P2P = "pipeline_parallel/schedules", "pipeline_parallel/p2p_communication"
_OURS = "megatron_fp8/mcore/config/fp8_checks"

_TE_OVERLAP = "an overlap of tensor parallel communication inside Transformer Engine's linears"
_FOR_MOE = ("num_moe_experts",)
_LATENT = "multi_latent_attention"  # it has its own fields for rotary positions, sizes and scale

FIELDS: dict[str, Field] = {
    # ---- sizes
    "num_layers": works(COUNT, _BLOCK),
    "hidden_size": works(SIZE, _ATTENTION),
    "num_attention_heads": works(COUNT, _ATTENTION),
    "num_query_groups": works(optional(COUNT), _ATTENTION),
    "kv_channels": works(optional(COUNT), _ATTENTION, unless=_LATENT),
    "ffn_hidden_size": works(optional(SIZE), _MLP),
    # ---- layers
    "normalization": works(one_of("LayerNorm", "RMSNorm"), "models/gpt/gpt_layer_specs"),
    "layernorm_epsilon": works(number(LEAST, 1), _BLOCK),
    "layernorm_zero_centered_gamma": works(FLAG, "megatron_fp8/mcore/layers/norm"),
    "persist_layer_norm": ignored("the norms here have one implementation"),
    "memory_efficient_layer_norm": ignored("the norms here save no more than it would"),
    "qk_layernorm": works(FLAG, "models/gpt/gpt_layer_specs"),
    "qk_l2_norm": works(FLAG, "models/gpt/gpt_layer_specs"),
    "add_bias_linear": works(FLAG, _MLP),
    "add_qkv_bias": works(FLAG, _ATTENTION, unless=_LATENT),
    "gated_linear_unit": works(FLAG, _MLP),
    "activation_func": works(FUNCTION, _MLP),
    "activation_func_clamp_value": works(optional(number(LEAST, _HALF)), _MLP, "gated_linear_unit"),
    "glu_linear_offset": works(number(-_HALF, _HALF), _MLP, "gated_linear_unit"),
    "bias_activation_fusion": works(FLAG, _MLP),
    "bias_dropout_fusion": works(FLAG, _LAYER),
    "use_te_activation_func": te_layers("that activation function"),
    "hidden_dropout": works(PROBABILITY, _LAYER),
    "fp32_residual_connection": refused("the layers here take their input in params_dtype alone"),
    "apply_residual_connection_post_layernorm": refused("Megatron-Core has dropped it and reads it nowhere"),
    # ---- attention and positions
    "attention_backend": ignored(
        "attention runs as PyTorch's scaled_dot_product_attention, which chooses its own kernel",
        one_of("flash", "fused", "unfused", "local", "auto"),
    ),
    "softmax_scale": works(optional(number(LEAST, _HALF)), _ATTENTION, unless=_LATENT),
    "softmax_type": works(one_of("vanilla", "off-by-one", "learnable"), _SDPA),
    "attention_dropout": works(PROBABILITY, _SDPA),
    "attention_softmax_in_fp32": Field(FLAG, ignored="the softmax runs in float32 here"),
    "apply_query_key_layer_scaling": works(FLAG, _SDPA),
    "masked_softmax_fusion": works(FLAG, _SDPA),
    "attention_output_gate": works(FLAG, _ATTENTION),
    "window_size": works(optional(list_of(integer(-1, 2**24, "tokens"), 2)), _SDPA),
    "window_attn_skip_freq": works(PATTERN, _SDPA, "window_size"),
    "no_rope_freq": works(PATTERN, _ATTENTION, unless=_LATENT),
    "rotary_interleaved": works(FLAG, "models/gpt/gpt_model"),
    "apply_rope_fusion": te_function("fused rotary embedding", "models/common/embeddings/rope_utils"),
    "fused_single_qkv_rope": te_function("fused rotary embedding", _ATTENTION),
    "mrope_section": ignored(
        "it is for position_embedding_type='mrope'", optional(list_of(integer(1, 2**16)))
    ),
    "multi_latent_attention": works(FLAG, "models/gpt/gpt_layer_specs"),
    "qk_clip": refused("attention here does not keep its largest logits"),
    "qk_clip_alpha": works(number(0, 1), _ATTENTION, "qk_clip"),
    "qk_clip_threshold": works(POSITIVE, _ATTENTION, "qk_clip"),
    "log_max_attention_logit": refused("attention here does not keep its largest logits"),
    "flash_decode": works(FLAG, _ATTENTION),
    "test_mode": works(FLAG, _ATTENTION),
    "batch_invariant_mode": te_layers("its attention"),
    "experimental_attention_variant": refused(
        f"{_LOCAL}, and attention is plain", optional(one_of("gated_delta_net", "dsa"))
    ),
    # ---- initialisation
    "init_method": works(optional(FUNCTION), _MLP),
    "output_layer_init_method": works(optional(FUNCTION), _MLP),
    "embedding_init_method": works(optional(FUNCTION), "models/common/embeddings/language_model_embedding"),
    "init_method_std": works(number(0, 1e3), "transformer/transformer_config"),
    "embedding_init_method_std": works(optional(number(0, 1e3)), "transformer/transformer_config"),
    "init_model_with_meta_device": refused("it is for Megatron-FSDP"),
    "perform_initialization": works(FLAG, "transformer/utils"),
    "use_cpu_initialization": works(optional(FLAG), "tensor_parallel/layers"),
    # ---- precision
    "fp16": works(FLAG, _SDPA),
    "bf16": works(FLAG, _SDPA),
    "params_dtype": works(DTYPE, "tensor_parallel/layers"),
    "pipeline_dtype": works(optional(DTYPE), _P2P),
    "enable_autocast": Field(
        FLAG, where=_PP, refused="Megatron-Core's schedules open CUDA's autocast", here=compat.has_cuda
    ),
    "autocast_dtype": works(optional(DTYPE), _PP),
    "disable_bf16_reduced_precision_matmul": Field(
        FLAG,
        where="transformer/transformer_config",
        refused="it is of CUDA's products",
        here=compat.has_cuda,
    ),
    "use_kitchen": refused("kitchen's layers are another FP8", here=lambda: False),
    "use_kitchen_attention": refused("kitchen's layers are another FP8", here=lambda: False),
    "kitchen_attention_backend": works(one_of("sdpa", "fa"), "models/gpt/gpt_layer_specs", "use_kitchen"),
    "quant_recipe": te_layers("a precision for each module", ANYTHING),
    "fp4": te_layers("FP4", optional(one_of("e2m1"))),
    "fp4_recipe": works(optional(one_of("nvfp4", "custom")), "fp4_utils", "fp4"),
    "fp4_param": works(FLAG, "fp4_utils", "fp4"),
    "fp4_quantizer_factory": works(optional(text()), "fp4_utils", "fp4"),
    "disable_parameter_transpose_cache": ignored("this package has no cache of transposed weights to disable"),
    # ---- FP8
    "fp8": works(optional(one_of(*FP8_FORMATS)), _OURS),
    "fp8_recipe": works(optional(RECIPE), _OURS),
    "fp8_param": works(FLAG, _OURS),
    "fp8_quantizer_factory": works(optional(text("the import path of a callable")), _OURS),
    "fp8_margin": works(integer(0, 2**6, "powers of two"), "megatron_fp8/fp8_utils"),
    "fp8_interval": works(integer(1, 2**31 - 1, "iterations"), "megatron_fp8/fp8_utils"),
    "fp8_amax_history_len": works(integer(1, 2**16, "iterations"), "megatron_fp8/fp8_utils"),
    "fp8_amax_compute_algo": works(one_of("most_recent", "max"), "megatron_fp8/fp8_utils"),
    "fp8_wgrad": works(FLAG, "megatron_fp8/mcore/sites"),
    "activation_func_fp8_input_store": works(FLAG, _MLP),
    "first_last_layers_bf16": works(FLAG, _OURS),
    "num_layers_at_start_in_bf16": works(integer(0, 2**16, "layers"), _OURS),
    "num_layers_at_end_in_bf16": works(integer(0, 2**16, "layers"), _OURS),
    "fp8_dot_product_attention": refused(_ATTENTION_IN_BF16, here=lambda: False),
    "fp8_multi_head_attention": refused(_ATTENTION_IN_BF16, here=lambda: False),
    "tp_only_amax_red": works(FLAG, "megatron_fp8/mcore/environment"),
    # ---- tensor, sequence, context and expert parallelism
    "tensor_model_parallel_size": works(RANKS, "transformer/transformer_config"),
    "sequence_parallel": works(FLAG, "tensor_parallel/layers"),
    "context_parallel_size": works(RANKS, "megatron_fp8/mcore/layers/attention"),
    "cp_comm_type": ignored(
        "context parallelism here always gathers keys and values",
        optional(either(_CP_COMM, list_of(_CP_COMM))),
    ),
    "hierarchical_context_parallel_sizes": refused(
        "context parallelism here has one level", optional(list_of(RANKS))
    ),
    "hybrid_context_parallel": refused("it needs packed sequences, which attention here does not take"),
    "max_seqlen_per_dp_cp_rank": works(optional(SIZE), "datasets/data_schedule", "hybrid_context_parallel"),
    "expert_model_parallel_size": works(RANKS, _EXPERTS),
    "expert_tensor_parallel_size": works(optional(RANKS), "parallel_state"),
    "moe_extended_tp": ignored("Megatron-Core has dropped it and reads it nowhere"),
    "async_tensor_model_parallel_allreduce": ignored("Megatron-Core always overlaps this all-reduce"),
    "symmetric_ar_type": te_layers(
        "that all-reduce", optional(one_of("two_shot", "one_shot", "multimem_all_reduce"))
    ),
    "tp_comm_overlap": refused("FP8 linears overlap their communication without it", here=compat.has_te),
    **dict.fromkeys(
        (
            "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs",
            "tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs",
            "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv", "tp_comm_overlap_disable_fc1",
        ),
        ignored(f"it is about {_TE_OVERLAP}"),
    ),
    "tp_comm_bootstrap_backend": ignored(f"it is about {_TE_OVERLAP}", one_of("nccl", "mpi", "gloo")),
    # ---- pipelines
    "pipeline_model_parallel_size": works(RANKS, _BLOCK),
    "virtual_pipeline_model_parallel_size": works(optional(COUNT), _PP, "pipeline_model_parallel_size"),
    "pipeline_model_parallel_comm_backend": refused(
        "the process groups have the backend of the run", optional(one_of("nccl", "ucc"))
    ),
    "pipeline_model_parallel_layout": works(optional(LAYOUT), _BLOCK),
    "num_layers_in_first_pipeline_stage": works(optional(COUNT), _BLOCK, "pipeline_model_parallel_size"),
    "num_layers_in_last_pipeline_stage": works(optional(COUNT), _BLOCK, "pipeline_model_parallel_size"),
    "account_for_embedding_in_pipeline_split": works(FLAG, _BLOCK, "pipeline_model_parallel_size"),
    "account_for_loss_in_pipeline_split": works(FLAG, _BLOCK, "pipeline_model_parallel_size"),
    "microbatch_group_size_per_vp_stage": works(optional(COUNT), _PP),
    "variable_seq_lengths": works(FLAG, _P2P, "pipeline_model_parallel_size"),
    "overlap_p2p_comm": works(FLAG, _PP, "virtual_pipeline_model_parallel_size"),
    "batch_p2p_comm": works(FLAG, _P2P, "pipeline_model_parallel_size"),
    "batch_p2p_sync": works(FLAG, _P2P, "pipeline_model_parallel_size"),
    "overlap_p2p_comm_warmup_flush": works(FLAG, _PP, "virtual_pipeline_model_parallel_size"),
    "use_ring_exchange_p2p": refused("released versions of torch have no ring_exchange"),
    "deallocate_pipeline_outputs": works(FLAG, _PP, "pipeline_model_parallel_size"),
    "defer_embedding_wgrad_compute": works(FLAG, _PP, "pipeline_model_parallel_size"),
    "wgrad_deferral_limit": works(
        integer(0, 2**16), "tensor_parallel/layers", "defer_embedding_wgrad_compute"
    ),
    "mtp_standalone": Field(FLAG, where=_P2P),  # Megatron-Core sets it from the pipeline's layout
    # ---- memory
    "recompute_granularity": works(optional(one_of("full", "selective")), _BLOCK),
    "recompute_method": works(
        optional(one_of("uniform", "block")), _BLOCK, "recompute_granularity", "full"
    ),
    "recompute_num_layers": works(optional(COUNT), _BLOCK, "recompute_granularity", "full"),
    "recompute_modules": works(optional(list_of(text())), _LAYER),
    "distribute_saved_activations": works(
        FLAG, "tensor_parallel/random", "recompute_granularity", "full"
    ),
    "num_microbatches_with_partial_activation_checkpoints": works(
        optional(COUNT), _PP, "recompute_granularity"
    ),
    "cpu_offloading": te_function("moving activations", _BLOCK, instead=_SAVE_ON_CPU),
    "cpu_offloading_num_layers": works(integer(0, 2**16), _BLOCK, "cpu_offloading"),
    "cpu_offloading_activations": works(FLAG, _BLOCK, "cpu_offloading"),
    "cpu_offloading_weights": works(FLAG, _BLOCK, "cpu_offloading"),
    "cpu_offloading_double_buffering": works(FLAG, _BLOCK, "cpu_offloading"),
    "_cpu_offloading_context": works(ANYTHING, _BLOCK),
    "fine_grained_activation_offloading": te_function("moving activations", _LAYER, instead=_SAVE_ON_CPU),
    "offload_modules": works(optional(list_of(text())), _LAYER, "fine_grained_activation_offloading"),
    "min_offloaded_tensor_size": works(
        integer(0, 2**40, "bytes"), "models/gpt/gpt_model", "fine_grained_activation_offloading"
    ),
    "gradient_accumulation_fusion": Field(
        FLAG,
        where="tensor_parallel/layers",
        refused="it needs a GPU and apex with fused_weight_gradient_mlp_cuda; FP8 linears need none to accumulate",
        here=lambda: compat.uses_apex("fused_weight_gradient_mlp_cuda"),
    ),
    "delay_wgrad_compute": refused("the weight gradient is computed in its backward pass"),
    "clone_scatter_output_in_embedding": works(
        FLAG, "models/common/embeddings/language_model_embedding", "sequence_parallel"
    ),
    # ---- the loss, and multi-token prediction
    "cross_entropy_loss_fusion": works(FLAG, "models/common/language_module/language_module"),
    "cross_entropy_fusion_impl": works(
        one_of("native", "te"), "models/common/language_module/language_module", "cross_entropy_loss_fusion"
    ),
    "calculate_per_token_loss": works(FLAG, _PP),
    "mtp_num_layers": works(optional(integer(1, 2**10)), "models/gpt/gpt_model"),
    "mtp_loss_scaling_factor": works(NOT_NEGATIVE, "models/gpt/gpt_model", "mtp_num_layers"),
    # ---- mixture of experts
    "num_moe_experts": works(optional(COUNT), _MOE),
    "moe_ffn_hidden_size": works(optional(SIZE), _EXPERTS, *_FOR_MOE),
    "moe_layer_freq": works(either(COUNT, list_of(integer(0, 1))), "models/gpt/gpt_layer_specs", *_FOR_MOE),
    "moe_shared_expert_intermediate_size": works(optional(SIZE), _MOE, *_FOR_MOE),
    "moe_shared_expert_gate": works(FLAG, _MOE, "moe_shared_expert_intermediate_size"),
    "moe_shared_expert_overlap": works(FLAG, _MOE, "moe_shared_expert_intermediate_size"),
    "moe_router_load_balancing_type": works(
        either(
            one_of("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
            list_of(one_of("aux_loss", "seq_aux_loss", "global_aux_loss")),
        ),
        _ROUTER,
        *_FOR_MOE,
    ),
    "moe_router_topk": works(COUNT, _ROUTER, *_FOR_MOE),
    "moe_router_num_groups": works(optional(COUNT), _ROUTER, "moe_router_group_topk"),
    "moe_router_group_topk": works(optional(COUNT), _ROUTER, *_FOR_MOE),
    "moe_router_topk_limited_devices": refused(
        "Megatron-Core replaced it by moe_router_group_topk and moe_router_num_groups", optional(COUNT)
    ),
    "moe_router_pre_softmax": works(FLAG, _ROUTER, *_FOR_MOE),
    "moe_router_topk_scaling_factor": works(optional(POSITIVE), _ROUTER, *_FOR_MOE),
    "moe_router_score_function": works(one_of("softmax", "sigmoid"), _ROUTER, *_FOR_MOE),
    "moe_router_dtype": works(optional(one_of("fp32", "fp64")), _ROUTER, *_FOR_MOE),
    "moe_router_enable_expert_bias": works(FLAG, _ROUTER, *_FOR_MOE),
    "moe_router_bias_update_rate": works(
        NOT_NEGATIVE, "distributed/finalize_model_grads", "moe_router_enable_expert_bias"
    ),
    "moe_router_force_load_balancing": works(FLAG, _ROUTER, *_FOR_MOE),
    "moe_router_padding_for_quantization": works(FLAG, _DISPATCHER, *_FOR_MOE),
    "moe_router_padding_for_fp8": works(FLAG, "transformer/transformer_config", *_FOR_MOE),
    "moe_router_fusion": te_function("fused routing", _ROUTER),
    "moe_enable_routing_replay": works(FLAG, _ROUTER, *_FOR_MOE),
    "moe_aux_loss_coeff": works(either(NOT_NEGATIVE, list_of(NOT_NEGATIVE)), _ROUTER, *_FOR_MOE),
    "moe_z_loss_coeff": works(optional(NOT_NEGATIVE), _ROUTER, *_FOR_MOE),
    "moe_input_jitter_eps": works(optional(number(0, 1, without=[1])), _ROUTER, *_FOR_MOE),
    "moe_token_dropping": refused("Megatron-Core does not have it; moe_expert_capacity_factor drops tokens"),
    "moe_token_dispatcher_type": works(one_of("allgather", "alltoall", "flex"), _MOE, *_FOR_MOE),
    "moe_enable_deepep": works(FLAG, "transformer/transformer_config", "moe_token_dispatcher_type", "flex"),
    "moe_flex_dispatcher_backend": works(
        one_of("deepep", "hybridep"), _DISPATCHER, "moe_token_dispatcher_type", "flex"
    ),
    "moe_deepep_num_sms": works(COUNT, _DISPATCHER, "moe_token_dispatcher_type", "flex"),
    "moe_hybridep_num_sms": works(COUNT, _DISPATCHER, "moe_token_dispatcher_type", "flex"),
    "moe_per_layer_logging": ignored("Megatron-Core reads it nowhere; training scripts of its own do"),
    "moe_expert_capacity_factor": works(optional(ANY_NUMBER), _DISPATCHER, *_FOR_MOE),
    "moe_pad_expert_input_to_capacity": works(FLAG, _DISPATCHER, "moe_expert_capacity_factor"),
    "moe_token_drop_policy": works(one_of("probs", "position"), _ROUTER, "moe_expert_capacity_factor"),
    "moe_layer_recompute": works(FLAG, _MOE, *_FOR_MOE),
    "moe_permute_fusion": te_function("fused permutation", _DISPATCHER),
    "moe_apply_probs_on_input": works(FLAG, _EXPERTS, *_FOR_MOE),
    "moe_grouped_gemm": works(FLAG, "megatron_fp8/mcore/spec", *_FOR_MOE),
    "moe_use_legacy_grouped_gemm": works(FLAG, "models/gpt/moe_module_specs", "moe_grouped_gemm"),
    "use_fused_weighted_squared_relu": ignored("it is for grouped experts"),
    "moe_latent_size": te_layers("the latent projection of experts", optional(SIZE)),
    "overlap_moe_expert_parallel_comm": refused("its schedule needs Transformer Engine's layers", here=compat.has_te),
    "ep_overlap_early_attn_memory_release": works(
        FLAG, "models/common/model_chunk_schedule_plan", "overlap_moe_expert_parallel_comm"
    ),
    # ---- other models than GPT
    "is_hybrid_model": works(FLAG, "transformer/transformer_config"),
    **dict.fromkeys(
        ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups"), ignored("it is for Mamba layers", SIZE)
    ),
    "mamba_num_heads": ignored("it is for Mamba layers", optional(SIZE)),
    "use_mamba_mem_eff_path": ignored("it is for Mamba layers"),
    "linear_attention_freq": ignored("it is for layers of linear attention", PATTERN),
    **dict.fromkeys(
        (
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
            "linear_num_value_heads",
        ),
        ignored("it is for layers of linear attention", optional(SIZE)),
    ),
    **dict.fromkeys(
        ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
        ignored("it is for DeepSeek's sparse attention", optional(SIZE)),
    ),
    "dsa_indexer_loss_coeff": ignored("it is for DeepSeek's sparse attention", optional(NOT_NEGATIVE)),
    "dsa_indexer_use_sparse_loss": ignored("it is for DeepSeek's sparse attention"),
    "heterogeneous_block_specs": refused("layers here are all of one shape"),
    "hetereogenous_dist_checkpoint": works(FLAG, _BLOCK),
    # ---- CUDA graphs
    "enable_cuda_graph": refused(_OWN_GRAPHS, here=compat.has_cuda),
    "external_cuda_graph": refused(_OWN_GRAPHS, here=compat.has_cuda),
    "cuda_graph_impl": refused(_OWN_GRAPHS, one_of("none", "local", "transformer_engine"), here=compat.has_cuda),
    "cuda_graph_scope": works(SCOPE, "transformer/cuda_graphs"),
    "cuda_graph_use_single_mempool": works(FLAG, "transformer/cuda_graphs", "cuda_graph_impl"),
    "cuda_graph_retain_backward_graph": works(FLAG, "transformer/cuda_graphs", "cuda_graph_impl"),
    "cuda_graph_warmup_steps": works(integer(0, 2**16), "transformer/cuda_graphs", "cuda_graph_impl"),
    # ---- inference
    "inference_rng_tracker": works(FLAG, "tensor_parallel/random"),
    "inference_sampling_seed": works(
        integer(0, 2**63 - 1), "inference/text_generation_controllers/text_generation_controller"
    ),
    "use_inference_optimized_layers": ignored("Megatron-Core reads it nowhere"),
    "inference_fuse_tp_communication": te_layers("the fused communication of inference"),
    "mlp_chunks_for_prefill": works(COUNT, _LAYER),
    # ---- the rest
    "transformer_impl": Field(
        one_of("local", "transformer_engine", "inference_optimized"),
        ignored=f"{_LOCAL}; fp8_backend selects the GEMMs",
    ),
    "deterministic_mode": works(FLAG, "tensor_parallel/layers"),
    "use_te_rng_tracker": te_function("that tracker of random numbers", "tensor_parallel/random"),
    "config_logger_dir": works(folder_or_none(), "config_logger"),
    "barrier_with_L1_time": works(FLAG, _PP),
    **dict.fromkeys(
        ("timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        works(ANYTHING, _PP),
    ),
}  # fmt: skip

OWN_RULES: dict[str, Rule] = {
    "fp8_amax_epsilon": NOT_NEGATIVE,
    "fp8_pow2_scales": optional(FLAG),
    "fp8_stochastic_rounding": FLAG,
    "fp8_keep_columnwise": FLAG,
    "fp8_output_layer": FLAG,
    "moe_fp8_dispatch": FLAG,
    "fp8_size_filter": optional(text("the path of a table that `megatron-fp8 bench --tune` wrote")),
    "fp8_size_filter_tokens": optional(integer(1, 2**40, "tokens of a microbatch")),
    "fp8_guard": either(FLAG, one_of(*LADDERS)),
    "fp8_guard_patience": integer(1, 2**31 - 1, "iterations in a row"),
}
"""Rules for this package's own fields, as far as they concern one value."""

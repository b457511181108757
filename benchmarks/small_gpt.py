"""The small Llama-like GPT of the CPU benchmarks, on Megatron-Core: 8 layers, hidden size 512; other sizes if asked."""

from __future__ import annotations

from typing import Any

import torch

LAYERS, HIDDEN, HEADS, FFN, VOCAB = 8, 512, 8, 1408, 512


def small_gpt(
    recipe: str | None,
    sequence: int,
    *,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    heads: int = HEADS,
    ffn: int = FFN,
) -> Any:
    """Float16Module around the GPTModel, BF16, in FP8 where a recipe is named; the same initial weights each time."""
    import torch.nn.functional as F
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import Float16Module

    from megatron_fp8 import TransformerConfig
    from megatron_fp8.mcore.spec import get_gpt_layer_fp8_spec

    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    fp8 = {} if recipe is None else {"fp8": "hybrid", "fp8_recipe": recipe}
    if recipe == "nvfp4":
        fp8 = {"fp4": "e2m1", "fp4_recipe": recipe}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads // 4,
        ffn_hidden_size=ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **fp8,
    )
    model = GPTModel(
        config,
        get_gpt_layer_fp8_spec(config),
        vocab_size=VOCAB,
        max_sequence_length=sequence,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return Float16Module(config, model)

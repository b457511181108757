"""Fields of a model's shape and function: each that is set changes the loss."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import pytest
import torch

from benchmarks.support.ranks import Layout, RankPool, model_parallel

TOKENS, VOCABULARY = 32, 128
DENSE = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": VOCABULARY,
    "bf16": False, "add_bias_linear": False, "normalization": "RMSNorm",
}  # fmt: skip
LATENT = {
    **DENSE, "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 16, "v_head_dim": 8, "rotary_scaling_factor": 4.0, "mscale_all_dim": 0.5,
}  # fmt: skip
DENSE_FIELDS = """
    hidden_size num_layers ffn_hidden_size num_query_groups kv_channels normalization layernorm_epsilon
    layernorm_zero_centered_gamma qk_layernorm qk_l2_norm activation_func gated_linear_unit add_bias_linear add_qkv_bias
    softmax_scale softmax_type window_size attention_output_gate position_embedding_type rotary_percent rotary_base
    rope_scaling rotary_interleaved no_rope_freq num_moe_experts multi_latent_attention
    """
LATENT_FIELDS = """
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_scaling_factor
    original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim qk_layernorm layernorm_epsilon
    """
BASES = {
    "rope": (DENSE, DENSE_FIELDS.split()),
    "yarn": (LATENT, LATENT_FIELDS.split()),
    "latent_rope": ({**LATENT, "rope_type": "rope"}, ["rotary_percent", "rotary_base", "mscale_all_dim"]),
}
"""Name -> a model, and the fields that it must compute with: those that this package's layers read or replace."""
OTHER = {  # where twice the value, or the other truth, will not do
    "position_embedding_type": "none", "rope_type": "rope", "normalization": "LayerNorm", "activation_func": "silu",
    "softmax_type": "learnable", "rotary_percent": 0.5, "num_query_groups": 2, "kv_channels": 32, "no_rope_freq": [1, 0],
    "window_size": [3, 0], "q_lora_rank": None, "softmax_scale": 0.7, "beta_fast": 2.0,
    "layernorm_epsilon": 0.01, "original_max_position_embeddings": 64,
    "beta_slow": 8.0,
}  # fmt: skip


def other(name: str, value: Any) -> Any:
    if name in OTHER:
        return OTHER[name]
    return not value if isinstance(value, bool) else value * 2 if value else 1


def spoken_or_computed(fields: dict[str, Any]) -> tuple[float | None, list[str]]:
    """A model section's loss on a few tokens, None if it is refused, and what is said of it."""
    from megatron_fp8.train.config.model_section import ModelSection, transformer_config
    from megatron_fp8.train.config.run_config import RunConfig
    from megatron_fp8.train.model import build_model

    run = RunConfig(model=ModelSection(**fields))
    run.train.seq_length = TOKENS
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = build_model(transformer_config(run.model), run, VOCABULARY)
        except ValueError as error:
            return None, [str(error)]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        found = model.eval()(tokens, torch.arange(TOKENS)[None], None, labels=tokens.roll(-1, 1))
    return found.double().mean().item(), [str(w.message) for w in caught]


def without_effect(base: str) -> list[str]:
    """A rank case: the fields that change nothing."""
    from megatron_fp8.train.config.model_section import ModelSection

    fields, names = BASES[base]
    with model_parallel(Layout()):
        as_it_is, _ = spoken_or_computed(fields)
        assert as_it_is is not None
        idle = []
        for name in names:
            now = getattr(ModelSection(**fields), name)
            assert other(name, now) != now
            loss, said = spoken_or_computed({**fields, name: other(name, now)})
            assert loss is not None or name in said[0], said
            if loss == as_it_is:
                idle.append(name)
    return idle


@pytest.mark.parametrize("base", BASES)
def test_what_is_set_changes_the_loss_or_is_refused(ranks: RankPool, base: str) -> None:
    assert ranks(1).run(without_effect, base)[0] == []

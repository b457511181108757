"""Fields of a model's shape and function: each that is set changes the loss, or is refused or said to do nothing."""

from __future__ import annotations

import math
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
BASES = {
    "rope": DENSE,
    "learned_absolute": {**DENSE, "position_embedding_type": "learned_absolute"},
    "yarn": LATENT,
    "latent_rope": {**LATENT, "rope_type": "rope"},
}
OTHER = {  # where twice the value, or the other truth, will not do
    "position_embedding_type": "none", "rope_type": "rope", "normalization": "LayerNorm", "activation_func": "silu",
    "softmax_type": "learnable", "rotary_percent": 0.5, "num_query_groups": 2, "kv_channels": 32, "no_rope_freq": [1, 0],
    "window_size": [3, 0], "q_lora_rank": None, "mrope_section": [1, 1], "softmax_scale": 0.7, "beta_fast": 2.0,
    "moe_router_load_balancing_type": "none", "moe_router_score_function": "sigmoid", "moe_token_drop_policy": "position",
    "experimental_attention_variant": "dsa", "layernorm_epsilon": 0.01, "original_max_position_embeddings": 64,
    "beta_slow": 8.0,
}  # fmt: skip
NOT_HERE = {
    "is_hybrid_model": "it is about how weights are drawn, and all weights are filled",
    "mtp_num_layers": "models for inference leave it out",
    "apply_query_key_layer_scaling": "it divides before the softmax and multiplies in it: other roundings alone",
}


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


def without_a_word(base: str) -> list[str]:
    """A rank case: the fields that change nothing in silence, that are refused namelessly, or are said to do nothing and
    do."""
    from megatron_fp8.train.config.model_fields import FUNCTION, SHAPE
    from megatron_fp8.train.config.model_section import ModelSection

    fields, wrong = BASES[base], []
    with model_parallel(Layout()):
        as_it_is, _ = spoken_or_computed(fields)
        assert as_it_is is not None
        for name in sorted((SHAPE | FUNCTION) - NOT_HERE.keys()):
            now = getattr(ModelSection(**fields), name)
            if other(name, now) == now:
                continue
            loss, said = spoken_or_computed({**fields, name: other(name, now)})
            idle = [line for line in said if line.startswith(f"{name}=") and "no effect" in line]
            if loss is None and name not in said[0]:
                wrong.append(f"{name}: {said[0]}")
            if loss is not None and (loss == as_it_is) != bool(idle):
                wrong.append(f"{name}: {loss} and {as_it_is}, said: {idle}")
    return wrong


@pytest.mark.parametrize("base", BASES)
def test_what_is_set_changes_the_loss_or_is_spoken_of(ranks: RankPool, base: str) -> None:
    assert ranks(1).run(without_a_word, base)[0] == []


def losses_at_the_edges(rope: str) -> dict[tuple[str, float], float]:
    """A rank case: (field, value) -> the loss, for the least and the largest values that latent attention's numbers may
    have; those that are refused together with others are left out."""
    from megatron_fp8.mcore.config.mla_field_rules import LATENT_FIELDS
    from megatron_fp8.mcore.config.rules import SIZE

    found = {}
    with model_parallel(Layout()):
        for name, field in LATENT_FIELDS.items():
            for value in field.rule.edges if field.rule.edges != SIZE.edges else ():
                value = int(value) if name == "rotary_base" else value
                if field.rule.holds(value):
                    changed = {"mscale": 1.0, "rotary_scaling_factor": 1e6, name: value}
                    loss, _ = spoken_or_computed({**LATENT, "rope_type": rope, **changed})
                    if loss is not None:
                        found[name, value] = loss
    return found


@pytest.mark.parametrize("rope", ["yarn", "rope"])
def test_no_number_that_latent_attention_takes_ends_in_nan(ranks: RankPool, rope: str) -> None:
    found = ranks(1).run(losses_at_the_edges, rope)[0]
    assert {"rotary_scaling_factor", "mscale_all_dim", "rotary_percent"} <= {name for name, _ in found}
    assert all(map(math.isfinite, found.values())), found

"""Converts latent attention (DeepSeek-V3's) between config.json and the model section."""

from __future__ import annotations

from typing import Any

_SAME = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_EPSILON = 1e-6  # of latents' norms, in DeepSeek's code and in transformers, independent of rms_norm_eps


def latent_section(config: dict[str, Any]) -> dict[str, Any]:
    """Model section fields for config.json's latent attention.

    Raises ValueError naming a field that is missing, or that Megatron-Core cannot express.
    """
    if missing := [name for name in _SAME if config.get(name) is None]:
        raise ValueError(f"config.json has no {missing[0]}: it is needed to build the model.")
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups not in (None, heads):
        raise ValueError(
            f"config.json has num_key_value_heads={groups} and num_attention_heads={heads}: latents serve all heads, and"
            " both must be the same."
        )
    if config.get("rms_norm_eps", _EPSILON) != _EPSILON:
        raise ValueError(
            f"config.json has rms_norm_eps={config['rms_norm_eps']}: the norms of latents have {_EPSILON} whatever it is,"
            f" and Megatron-Core has one for all. Only {_EPSILON} can be imported."
        )
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.get("q_lora_rank"),
        **{ours: config[theirs] for theirs, ours in _SAME.items()},
    }


def check_latent(section: dict[str, Any]) -> None:
    """Raises ValueError naming a model section field whose latent attention differs from DeepSeek-V3's."""
    if missing := [name for name in ("q_lora_rank", *_SAME.values()) if name not in section]:
        raise ValueError(f"model.{missing[0]} is not there, and multi-latent attention needs it: add it.")
    supported = {
        "qk_layernorm": (True, False),
        "layernorm_epsilon": (_EPSILON, 1e-5),
        "add_qkv_bias": (False, False),
    }
    for name, (known, default) in supported.items():
        if section.get(name, default) != known:
            raise ValueError(
                f"model.{name}={section.get(name, default)!r} with model.multi_latent_attention=True has no counterpart:"
                f" DeepSeek-V3 has {name}={known!r}."
            )
    if not section.get("num_moe_experts"):
        raise ValueError(
            "model.num_moe_experts=None with model.multi_latent_attention=True has no counterpart: DeepSeek-V3 has"
            " experts."
        )


def latent_config(section: dict[str, Any]) -> dict[str, Any]:
    """config.json fields for a model section's latent attention."""
    heads = section["num_attention_heads"]
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": section.get("q_lora_rank"),
        **{theirs: section[ours] for theirs, ours in _SAME.items()},
        "rope_interleave": True,
        "attention_bias": False,
    }

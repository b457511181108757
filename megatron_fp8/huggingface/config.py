"""config.json and the model section of a run's config, each from the other.

Both directions refuse what the other side cannot say, by the name and value of the field: a model that is exported or
imported computes the same function, or it is not exported or imported.
"""

from __future__ import annotations

from typing import Any

from .architectures import ARCHITECTURES, Architecture
from .config_types import check_types
from .layout import Heads

VOCABULARY_MULTIPLE = 128
"""Rows of an imported vocabulary are padded to a multiple of this, which most tensor-parallel sizes divide."""

# Hugging Face's name -> ours, where the value is the same. The first five have no default.
_SAME = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
}
_REQUIRED = tuple(_SAME)[:5]

# Fields of config.json that change what is computed, and the only value that is known here.
_CONFIG_MUST_BE: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "dual_chunk_attention_config": None,
    "auto_map": None,  # code of the directory's own, which nobody here has read
}

# Fields of a model section, and the only values that the known families have; and Megatron-Core's defaults.
_SECTION_MUST_BE: dict[str, tuple[Any, Any]] = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "gated_linear_unit": (True, False),
    "activation_func": ("silu", "gelu"),
    "add_bias_linear": (False, True),
    "position_embedding_type": ("rope", "rope"),
    "rotary_percent": (1.0, 1.0),
    "rotary_interleaved": (False, False),
    "num_moe_experts": (None, None),
    "multi_latent_attention": (False, False),
    "qk_l2_norm": (False, False),
    "layernorm_zero_centered_gamma": (False, False),
    "apply_residual_connection_post_layernorm": (False, False),
    "softmax_scale": (None, None),
    "softmax_type": ("vanilla", "vanilla"),
    "window_size": (None, None),
    "no_rope_freq": (None, None),
    "attention_output_gate": (False, False),
    "experimental_attention_variant": (None, None),
    "glu_linear_offset": (0.0, 0.0),
    "activation_func_clamp_value": (None, None),
    "mtp_num_layers": (None, None),
}

# What an imported model's section says beside its sizes.
_IMPORTED: dict[str, Any] = {
    **{name: wanted for name, (wanted, default) in _SECTION_MUST_BE.items() if wanted != default},
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}

# Llama 3.1's scaling of rotary frequencies; Megatron-Core has all of it fixed but the factor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


# ------------------------------------------------------------------------------------------------ from config.json


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The family that config.json names. Raises ValueError if it is not a known one."""
    names = config.get("architectures") or [None]
    if not isinstance(names, list) or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"config.json has architectures={names}: only {', '.join(ARCHITECTURES)} can be imported (dense models "
            "with rotary positions, RMSNorm and SwiGLU; no mixture of experts)."
        )
    found = ARCHITECTURES[names[0]]
    if config.get("model_type") not in (None, found.model_type):  # by which some readers go
        raise ValueError(
            f"config.json has architectures={names} and model_type={config['model_type']!r}: of {found.name} it is"
            f" {found.model_type!r}. Correct one of them."
        )
    return found


def model_section(config: dict[str, Any]) -> dict[str, Any]:
    """The model section of a run that computes what config.json describes: plain values, for YAML.

    Raises ValueError naming the field: it is missing, or has a value that Megatron-Core's model does not have.
    """
    check_types(config)
    architecture = architecture_of(config)
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise ValueError(f"config.json has no {missing[0]}: it is needed to build the model.")
    for name, known in _CONFIG_MUST_BE.items():
        value = known if config.get(name) is None else config[name]
        # Qwen's files name a window and say beside it that it is not used.
        unused = name == "sliding_window" and config.get("use_sliding_window") is False
        if value != known and not unused:
            raise ValueError(f"config.json has {name}={value!r}: only {name}={known!r} can be imported.")
    windowed = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if windowed:
        raise ValueError(f"config.json has layer_types {windowed}: only 'full_attention' can be imported.")

    hidden, count = config["hidden_size"], config["num_attention_heads"]
    values = {
        "num_key_value_heads": count,
        "head_dim": architecture.head_dim or hidden // count,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    values |= {name: config[name] for name in _SAME if config.get(name) is not None}
    section = {ours: values[theirs] for theirs, ours in _SAME.items()}
    heads_of(section)
    return {
        **section,
        "padded_vocab_size": -(-values["vocab_size"] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        **_IMPORTED,
        "add_qkv_bias": architecture.qkv_bias,
        "qk_layernorm": architecture.qk_norm,
        **_rope_of(config),
    }


def _rope_kind(rope: dict[str, Any]) -> Any:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return kind if isinstance(kind, str) else repr(kind)


def _rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions, from rope_theta and rope_scaling, or from the rope_parameters of newer files."""
    kinds = [_rope_kind(config[name]) for name in ("rope_scaling", "rope_parameters") if config.get(name)]
    if len(set(kinds)) > 1:
        raise ValueError(
            f"config.json has a rope_scaling of type {kinds[0]!r} and rope_parameters of type {kinds[1]!r}: remove the"
            " one that is not meant."
        )
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if nested := next((name for name, value in rope.items() if isinstance(value, dict)), None):
        raise ValueError(
            f"config.json has rope_parameters of its own for {nested!r}: only one set for all layers can be imported."
        )
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if theta != int(theta):
        raise ValueError(f"config.json has rope_theta={theta}: Megatron-Core takes whole numbers only.")
    partial = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"config.json has partial_rotary_factor={partial}: only 1.0 can be imported.")
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    if kind == "default":
        return {"rotary_base": int(theta)}
    if kind != "llama3":
        raise ValueError(
            f"config.json has a rope_scaling (rope_parameters) of type {kind!r}: 'default' and 'llama3' can be imported."
        )
    if not isinstance(rope.get("factor"), (int, float)):
        raise ValueError(
            f"config.json has factor={rope.get('factor')!r} in its rope scaling: a number is needed."
        )
    for name, known in _LLAMA3.items():
        if rope.get(name) != known:
            raise ValueError(
                f"config.json has {name}={rope.get(name)!r} in its rope scaling: Megatron-Core's is fixed at {known}."
            )
    return {"rotary_base": int(theta), "rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}


# ------------------------------------------------------------------------------------------------ from a model section


def exported_architecture(section: dict[str, Any]) -> Architecture:
    """The family that computes what a model section does. Raises ValueError naming the field if there is none."""
    for name, (wanted, default) in _SECTION_MUST_BE.items():
        value = section.get(name, default)
        if value != wanted:
            raise ValueError(
                f"model.{name}={value!r} has no counterpart in the exported families ({', '.join(ARCHITECTURES)}): "
                f"only {name}={wanted!r} can be exported."
            )
    kind = bool(section.get("add_qkv_bias")), bool(section.get("qk_layernorm"))
    for architecture in ARCHITECTURES.values():
        if (architecture.qkv_bias, architecture.qk_norm) == kind:
            return architecture
    raise ValueError(
        "model.add_qkv_bias=True with model.qk_layernorm=True has no counterpart: Qwen2 has the one, Qwen3 the other."
    )


def heads_of(section: dict[str, Any]) -> Heads:
    """Sizes of the attention of a model section."""
    heads = section["num_attention_heads"]
    groups = section.get("num_query_groups") or heads
    return Heads(heads, groups, section.get("kv_channels") or section["hidden_size"] // heads)


def hf_config(section: dict[str, Any], vocab_size: int, positions: int) -> dict[str, Any]:
    """config.json of what a model section computes, without what depends on tokenizer and number format.

    Args:
        vocab_size: without padding.
        positions: the longest sequence (max_position_embeddings).

    Rotary positions are written as rope_theta and rope_scaling, which old and new readers know.

    Raises ValueError as exported_architecture does.
    """
    architecture, heads = exported_architecture(section), heads_of(section)
    filled = {
        "layernorm_epsilon": 1e-5,
        "share_embeddings_and_output_weights": False,
        **section,
        "vocab_size": vocab_size,
        "num_query_groups": heads.groups,
        "kv_channels": heads.head_dim,
        "ffn_hidden_size": section.get("ffn_hidden_size") or 4 * section["hidden_size"],
    }
    scaling = None
    if section.get("rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": float(section.get("rope_scaling_factor", 8.0)), **_LLAMA3}
    own = {"attention_bias": False} if architecture.name != "Qwen2ForCausalLM" else {}
    own |= {"mlp_bias": False} if architecture.name == "LlamaForCausalLM" else {"use_sliding_window": False}
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **{theirs: filled[ours] for theirs, ours in _SAME.items()},
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        "rope_theta": float(section.get("rotary_base", 10000)),
        "rope_scaling": scaling,
        **own,
    }

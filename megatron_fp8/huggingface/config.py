"""Converts between config.json and the model section of a run's config.

Both directions reject what the other side cannot express, by name and value of the field: an exported or
imported model computes the same function, or the conversion fails. Experts and rotary positions have
separate modules (moe.py, rotary.py). Types are checked first: such files are edited by hand and written by
many tools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..files.atomic_io import as_value_error
from ..files.strict_json import Kind, check_shape
from .architectures import ARCHITECTURES, REFUSED, Architecture
from .moe import MANY, check_experts, experts_config, experts_section
from .qkv_layout import heads_of
from .rotary import rotary_config, rotary_section

VOCABULARY_MULTIPLE = 128
"""An imported vocabulary is padded to a multiple of this; most tensor-parallel sizes divide it."""

# Hugging Face's name -> ours, for identical values. The first five have no default.
_SAME = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "layernorm_epsilon",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
}
_REQUIRED = tuple(_SAME)[:5]
_SAME_OF_HEADS = {"num_key_value_heads": "num_query_groups", "head_dim": "kv_channels"}

# Fields of config.json that change the computation, and the only supported value.
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
    "auto_map": None,  # custom code in the directory, not supported
}
# DeepSeek's directories contain code that is now part of transformers.
_KNOWN_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}

# Fields of a model section, the only values in supported families, and Megatron-Core's defaults.
_SECTION_MUST_BE: dict[str, tuple[Any, Any]] = {
    "normalization": ("RMSNorm", "LayerNorm"),
    "gated_linear_unit": (True, False),
    "activation_func": ("silu", "gelu"),
    "add_bias_linear": (False, True),
    "position_embedding_type": ("rope", "rope"),
    "rotary_percent": (1.0, 1.0),
    "rotary_interleaved": (False, False),
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
}

# Fields of an imported model's section besides its sizes.
_IMPORTED: dict[str, Any] = {
    **{name: wanted for name, (wanted, default) in _SECTION_MUST_BE.items() if wanted != default},
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


# ------------------------------------------------------------------------------------------------ from config.json


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The family named in config.json. Raises ValueError if unsupported."""
    names = config.get("architectures") or [None]
    if isinstance(names, list) and names[0] in REFUSED:
        raise ValueError(
            f"config.json has architectures={names}, which cannot be imported: {REFUSED[names[0]]}."
        )
    if not isinstance(names, list) or names[0] not in ARCHITECTURES:
        raise ValueError(
            f"config.json has architectures={names}: only {', '.join(ARCHITECTURES)} can be imported (rotary positions,"
            " RMSNorm and SwiGLU)."
        )
    found = ARCHITECTURES[names[0]]
    if config.get("model_type") not in (None, found.model_type):  # some readers use this field
        raise ValueError(
            f"config.json has architectures={names} and model_type={config['model_type']!r}: of {found.name} it is"
            f" {found.model_type!r}. Correct one of them."
        )
    return found


def model_section(config: dict[str, Any]) -> dict[str, Any]:
    """The model section of a run that computes what config.json describes, as plain values for YAML.

    Raises ValueError naming a field that is missing, or that Megatron-Core cannot express.
    """
    check_types(config)
    architecture = architecture_of(config)
    if missing := [name for name in _REQUIRED if config.get(name) is None]:
        raise ValueError(f"config.json has no {missing[0]}: it is needed to build the model.")
    _check_known(config, architecture)

    hidden, count = config["hidden_size"], config["num_attention_heads"]
    same = _SAME if architecture.latent else {**_SAME, **_SAME_OF_HEADS}
    values = {
        "num_key_value_heads": count,
        "head_dim": architecture.head_dim or hidden // count,
        "rms_norm_eps": architecture.rms_norm_eps,
        "tie_word_embeddings": False,
    }
    values |= {name: config[name] for name in same if config.get(name) is not None}
    section = {ours: values[theirs] for theirs, ours in same.items()}
    if architecture.latent:
        section |= latent_section(config)
    else:
        heads_of(section)
        section |= {"add_qkv_bias": architecture.qkv_bias, "qk_layernorm": architecture.qk_norm}
    return {
        **section,
        "padded_vocab_size": -(-values["vocab_size"] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        **_IMPORTED,
        **experts_section(config, architecture),
        **rotary_section(config, architecture),
    }


def _check_known(config: dict[str, Any], architecture: Architecture) -> None:
    """Raises ValueError naming a field of config.json that changes the computation in an unsupported way."""
    for name, known in _CONFIG_MUST_BE.items():
        value = known if config.get(name) is None else config[name]
        # Qwen's files have a window and a second field that disables it.
        unused = name == "sliding_window" and config.get("use_sliding_window") is False
        taken_over = name == "auto_map" and architecture.latent and value == _KNOWN_CODE
        if value != known and not (unused or taken_over):
            raise ValueError(f"config.json has {name}={value!r}: only {name}={known!r} can be imported.")
    if architecture.sliding_window and "sliding_window" not in config:
        raise ValueError(
            f"config.json has no sliding_window, and readers then give {architecture.name} one of"
            f" {architecture.sliding_window}: only sliding_window=None can be imported. If the model attends to all"
            ' tokens, add "sliding_window": null.'
        )
    windowed = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if windowed:
        raise ValueError(f"config.json has layer_types {windowed}: only 'full_attention' can be imported.")


# ------------------------------------------------------------------------------------------------ from a model section


def exported_architecture(section: dict[str, Any]) -> Architecture:
    """The family that computes the same as a model section. Raises ValueError naming the field if there is none."""
    for name, (supported, default) in _SECTION_MUST_BE.items():
        value = section.get(name, default)
        if value != supported:
            raise ValueError(
                f"model.{name}={value!r} has no counterpart in the exported families ({', '.join(ARCHITECTURES)}): "
                f"only {name}={supported!r} can be exported."
            )
    found = _of_this_kind(section)
    check_experts(section, found)
    return found


def _of_this_kind(section: dict[str, Any]) -> Architecture:
    if section.get("multi_latent_attention"):
        check_latent(section)
        return ARCHITECTURES["DeepseekV3ForCausalLM"]
    kind = (
        bool(section.get("add_qkv_bias")),
        bool(section.get("qk_layernorm")),
        bool(section.get("num_moe_experts")),
    )
    for architecture in ARCHITECTURES.values():
        has_experts = architecture.experts is not None
        if (architecture.qkv_bias, architecture.qk_norm, has_experts) == kind and not architecture.latent:
            return architecture
    if kind[2]:
        raise ValueError(
            f"model.add_qkv_bias=True with model.num_moe_experts={section['num_moe_experts']} has no counterpart: Mixtral"
            " and Qwen3-MoE have no such bias."
        )
    raise ValueError(
        "model.add_qkv_bias=True with model.qk_layernorm=True has no counterpart: Qwen2 has the one, Qwen3 the other."
    )


def hf_config(
    section: dict[str, Any], vocab_size: int, positions: int, family: str | None = None
) -> dict[str, Any]:
    """config.json for a model section, without fields of the tokenizer and the number format.

    Args:
        vocab_size: without padding.
        positions: the longest sequence (max_position_embeddings).
        family: architecture to write; ignored if its forward differs.

    Raises ValueError as exported_architecture does.
    """
    architecture = exported_architecture(section)
    named = ARCHITECTURES.get(family or "")
    if named is not None and named.computes_as(architecture):
        architecture = named
    filled = {
        "layernorm_epsilon": 1e-5,
        "share_embeddings_and_output_weights": False,
        **section,
        "vocab_size": vocab_size,
        "ffn_hidden_size": section.get("ffn_hidden_size") or 4 * section["hidden_size"],
    }
    if architecture.latent:
        own = latent_config(section)
    else:
        heads = heads_of(section)
        own = {"num_key_value_heads": heads.groups, "head_dim": heads.head_dim}
        own |= {"attention_bias": False} if not architecture.qkv_bias else {}
        own |= {"mlp_bias": False} if architecture.name == "LlamaForCausalLM" else {}
        own |= {"use_sliding_window": False} if architecture.model_type.startswith("qwen") else {}
        own |= {"sliding_window": None} if architecture.sliding_window else {}
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        **{theirs: filled[ours] for theirs, ours in _SAME.items()},
        **own,
        **experts_config(section, architecture),
        "hidden_act": "silu",
        "max_position_embeddings": positions,
        **rotary_config(section),
    }


_SAME_OF_LATENTS = {
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
    if missing := [name for name in _SAME_OF_LATENTS if config.get(name) is None]:
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
        **{ours: config[theirs] for theirs, ours in _SAME_OF_LATENTS.items()},
    }


def check_latent(section: dict[str, Any]) -> None:
    """Raises ValueError naming a model section field whose latent attention differs from DeepSeek-V3's."""
    if missing := [name for name in ("q_lora_rank", *_SAME_OF_LATENTS.values()) if name not in section]:
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
        **{theirs: section[ours] for theirs, ours in _SAME_OF_LATENTS.items()},
        "rope_interleave": True,
        "attention_bias": False,
    }


LARGEST = 2**31 - 1


def _whole(low: int, high: int) -> Kind:
    return Kind(lambda v: type(v) is int and low <= v <= high, f"a whole number from {low} to {high}")


def _each(shape: Any, names: str) -> dict[str, Any]:
    """Fields, of which each may be missing or null, with one shape."""
    return {f"{name}?": (shape, None) for name in names.split()}


_IDS = Kind(
    lambda v: all(type(e) is int and 0 <= e <= LARGEST for e in (v if isinstance(v, list) else [v])),
    "a token id, or a list of them",
)
_POSITIVE = Kind(lambda v: type(v) in (int, float) and 0 < v < math.inf, "a finite number above 0")
_GROUPS = {"*": _each(dict, "weights input_activations")}
_SHAPE = {
    **_each(
        _whole(1, LARGEST),
        "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size"
        " max_position_embeddings moe_intermediate_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim"
        " v_head_dim",
    ),
    **_each(
        _whole(1, MANY),
        "num_local_experts num_experts n_routed_experts num_experts_per_tok n_group topk_group decoder_sparse_step",
    ),
    **_each(
        _whole(0, MANY), "n_shared_experts first_k_dense_replace num_nextn_predict_layers num_mtp_layers"
    ),
    **_each(_POSITIVE, "rms_norm_eps rope_theta partial_rotary_factor routed_scaling_factor"),
    **_each(bool, "tie_word_embeddings norm_topk_prob rope_interleave"),
    **_each([str], "architectures layer_types"),
    **_each([int], "mlp_only_layers"),
    **_each(_IDS, "eos_token_id bos_token_id"),
    **_each(_each(_POSITIVE, "rope_theta factor partial_rotary_factor"), "rope_scaling rope_parameters"),
    **_each(_each(_GROUPS, "config_groups"), "quantization_config compression_config"),
}
"""The fields that are read here."""


def check_types(config: Mapping[str, Any], file: str = "config.json") -> None:
    """Raises ValueError naming the first used field with a wrong type; null is accepted."""
    with as_value_error(file, errors=ValueError):
        check_shape(config, _SHAPE)

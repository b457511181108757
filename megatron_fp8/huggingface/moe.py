"""Converts experts and their router between config.json and the model section.

family      scores of a token's experts                            Megatron-Core
Mixtral     softmax over the best k                                moe_router_pre_softmax=False
Qwen3-MoE   the same, or without norm_topk_prob the best of a      moe_router_pre_softmax
            softmax over all
DeepSeek    sigmoid, divided by their sum, times a factor;         moe_router_score_function='sigmoid',
            a bias that affects only the choice; expert groups     moe_router_enable_expert_bias,
            _group_topk
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .architectures import Architecture, layers_of_experts

MANY = 2**16  # limit for experts or mixed layers, which need memory for each one


@dataclass(frozen=True)
class _Fields:
    """Names in config.json for the number of experts (the first is written) and for their size."""

    count: tuple[str, ...]
    size: str


_FIELDS = {
    "MixtralForCausalLM": _Fields(("num_local_experts", "num_experts"), "intermediate_size"),
    "Qwen3MoeForCausalLM": _Fields(("num_experts", "num_local_experts"), "moe_intermediate_size"),
    "DeepseekV3ForCausalLM": _Fields(("n_routed_experts", "num_local_experts"), "moe_intermediate_size"),
}
_TOPK = "num_experts_per_tok"

# Fields of DeepSeek-V3's config.json that its modelling code branches on, and the only supported value.
_DEEPSEEK_MUST_BE = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

# Fields of a model section with experts, the only values in supported families, and Megatron-Core's defaults.
_SECTION_MUST_BE: dict[str, tuple[Any, Any]] = {
    "moe_shared_expert_gate": (False, False),
    "moe_expert_capacity_factor": (None, None),
    "moe_apply_probs_on_input": (False, False),
    "moe_latent_size": (None, None),
    "moe_router_force_load_balancing": (False, False),
    "moe_router_topk_limited_devices": (None, None),
}
_OF_FAMILIES: dict[str, tuple[Any, Any]] = {
    "moe_router_score_function": ("softmax", "softmax"),
    "moe_router_enable_expert_bias": (False, False),
    "moe_shared_expert_intermediate_size": (None, None),
    "moe_router_group_topk": (None, None),
    "moe_router_topk_scaling_factor": (None, None),
    "mtp_num_layers": (None, None),
}
_OF_DEEPSEEK: dict[str, tuple[Any, Any]] = {
    "moe_router_score_function": ("sigmoid", "softmax"),
    "moe_router_enable_expert_bias": (True, False),
}


# ------------------------------------------------------------------------------------------------ from config.json


def experts_section(config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Model section fields for the experts in config.json; none for a dense family.

    Raises ValueError naming a field that is missing, or that Megatron-Core's router cannot express.
    """
    if architecture.experts is None:
        return {}
    fields = _FIELDS[architecture.name]
    count = next((config[name] for name in fields.count if config.get(name) is not None), None)
    config_fields: dict[str, Any] = {
        fields.count[0]: count,
        fields.size: config.get(fields.size),
        _TOPK: config.get(_TOPK),
    }
    if missing := [name for name, value in config_fields.items() if value is None]:
        raise ValueError(f"config.json has no {missing[0]}: it is needed to build the model.")
    count, size, topk = (int(value) for value in config_fields.values())
    if config["num_hidden_layers"] > MANY:
        raise ValueError(
            f"config.json has num_hidden_layers={config['num_hidden_layers']}: at most {MANY} can be imported."
        )
    if topk > count:
        raise ValueError(f"config.json has {_TOPK}={topk}, and {fields.count[0]}={count}.")
    common = {
        "num_moe_experts": count,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": size,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
    }
    if architecture.latent:
        return {**common, **_deepseek(config, count, topk, size)}
    normed = config.get("norm_topk_prob", False) if architecture.name == "Qwen3MoeForCausalLM" else True
    if normed and topk == 1:
        raise ValueError(
            f"config.json has {_TOPK}=1 with scores that add up to 1: Megatron-Core refuses a router without a gradient."
        )
    return {**common, "moe_router_pre_softmax": not normed, **_frequency(config)}


def names_of_experts(architecture: Architecture) -> dict[str, str]:
    """Model section's names for the number of experts and for their size -> the family's names in config.json."""
    if architecture.experts is None:
        return {}
    fields = _FIELDS[architecture.name]
    return {"num_moe_experts": fields.count[0], "moe_ffn_hidden_size": fields.size}


def _frequency(config: dict[str, Any]) -> dict[str, Any]:
    """Which layers have experts, from Qwen3-MoE's fields."""
    layers = range(config["num_hidden_layers"])
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    frequency = [int(number not in dense and (number + 1) % step == 0) for number in layers]
    if not any(frequency):
        raise ValueError(
            f"config.json has decoder_sparse_step={step} and mlp_only_layers={dense}, which leave no layer with experts."
        )
    return {} if all(frequency) else {"moe_layer_freq": frequency}


def _deepseek(config: dict[str, Any], count: int, topk: int, size: int) -> dict[str, Any]:
    for name, known in _DEEPSEEK_MUST_BE.items():
        if config.get(name, known) != known:
            raise ValueError(
                f"config.json has {name}={config[name]!r}: only {name}={known!r} can be imported."
            )
    filled = {name: value for name, value in config.items() if value is not None}
    normed = config.get("norm_topk_prob", True)  # null counts as false, a missing field does not
    if bool(normed) != (topk > 1):
        raise ValueError(
            f"config.json has {_field_text(config, 'norm_topk_prob', normed)} with {_TOPK}={topk}: Megatron-Core divides"
            " sigmoid's scores by their sum where a token has several experts, and does not where it has one."
        )
    layers, dense = config["num_hidden_layers"], filled.get("first_k_dense_replace", 3)
    if dense >= layers:
        raise ValueError(
            f"config.json has {_field_text(filled, 'first_k_dense_replace', dense)}, which leaves none of"
            f" num_hidden_layers={layers} with experts."
        )
    shared = filled.get("n_shared_experts", 1)
    if shared < 1:
        raise ValueError(f"config.json has n_shared_experts={shared}: at least one can be imported.")
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(filled.get("routed_scaling_factor", 2.5)),
        "moe_shared_expert_intermediate_size": shared * size,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        **_groups(filled, count, topk),
        "mtp_num_layers": filled.get("num_nextn_predict_layers", filled.get("num_mtp_layers", 0)) or None,
    }


def _field_text(config: dict[str, Any], name: str, value: Any) -> str:
    """A field with its value, or the note that the value is the family's default."""
    return f"{name}={value}" if name in config else f"no {name} (then it is {value})"


def _groups(config: dict[str, Any], count: int, topk: int) -> dict[str, Any]:
    """The router's group selection; none if all groups are selected."""
    groups, chosen = config.get("n_group", 8), config.get("topk_group", 4)
    words = f"config.json has {_field_text(config, 'n_group', groups)} and {_field_text(config, 'topk_group', chosen)}"
    if count % groups or chosen > groups:
        raise ValueError(
            f"{words}: n_group must divide n_routed_experts={count}, and topk_group be at most n_group."
        )
    if chosen == groups:
        return {}
    if topk // chosen != 2 or count // groups < 2:
        raise ValueError(
            f"{words} with {_TOPK}={topk}: DeepSeek rates a group by its best 2 experts, Megatron-Core by its best"
            f" {_TOPK} // topk_group={topk // chosen}. Only 2 of at least 2 can be imported."
        )
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


# ------------------------------------------------------------------------------------------------ from a model section


def check_experts(section: dict[str, Any], architecture: Architecture) -> None:
    """Raises ValueError naming a model section field that the family's experts do not support."""
    own = _OF_DEEPSEEK if architecture.latent else _OF_FAMILIES
    rules = {**_SECTION_MUST_BE, **own} if architecture.experts else {"mtp_num_layers": (None, None)}
    for name, (supported, default) in rules.items():
        value = section.get(name, default)
        if value != supported:
            raise ValueError(
                f"model.{name}={value!r} has no counterpart in {architecture.name}: only {name}={supported!r} can be"
                " exported."
            )
    if architecture.experts is None:
        return
    kind = section.get("moe_router_load_balancing_type", "aux_loss")
    if "sinkhorn" in ([kind] if isinstance(kind, str) else kind):
        raise ValueError(
            f"model.moe_router_load_balancing_type={kind!r}: sinkhorn's routing cannot be exported."
        )
    refused = None
    if architecture.name == "MixtralForCausalLM":
        refused = "moe_router_pre_softmax" if section.get("moe_router_pre_softmax") else None
        refused = refused or (None if all(layers_of_experts(section)) else "moe_layer_freq")
    elif architecture.latent:
        refused = _unsupported_by_deepseek(section)
    if refused:
        raise ValueError(
            f"model.{refused}={section.get(refused)!r} has no counterpart in {architecture.name}, which the other fields"
            " make of it."
        )


def _unsupported_by_deepseek(section: dict[str, Any]) -> str | None:
    """A field that DeepSeek-V3 does not support; None if there is none."""
    sparse = layers_of_experts(section)
    if sparse != sorted(sparse):
        return "moe_layer_freq"
    shared, size = section.get("moe_shared_expert_intermediate_size") or 0, _size(section)
    if not shared or shared % size:
        return "moe_shared_expert_intermediate_size"
    chosen, topk = section.get("moe_router_group_topk"), section.get("moe_router_topk", 2)
    if chosen and topk // chosen != 2 and chosen != section.get("moe_router_num_groups"):
        return "moe_router_group_topk"
    return None


def _size(section: dict[str, Any]) -> int:
    return int(
        section.get("moe_ffn_hidden_size") or section.get("ffn_hidden_size") or 4 * section["hidden_size"]
    )


def experts_config(section: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    """config.json fields for a model section's experts; none for a dense family."""
    if architecture.experts is None:
        return {}
    fields, topk = _FIELDS[architecture.name], section.get("moe_router_topk", 2)
    found = {fields.count[0]: section["num_moe_experts"], _TOPK: topk, fields.size: _size(section)}
    dense = [number for number, sparse in enumerate(layers_of_experts(section)) if not sparse]
    if architecture.name == "Qwen3MoeForCausalLM":
        normed = not section.get("moe_router_pre_softmax")
        return {**found, "norm_topk_prob": normed, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    if not architecture.latent:
        return found
    groups = section.get("moe_router_num_groups") if section.get("moe_router_group_topk") else None
    return {
        **found,
        "n_shared_experts": section["moe_shared_expert_intermediate_size"] // _size(section),
        "first_k_dense_replace": len(dense),
        "routed_scaling_factor": float(section.get("moe_router_topk_scaling_factor") or 1.0),
        "n_group": groups or 1,
        "topk_group": section.get("moe_router_group_topk") or 1,
        "norm_topk_prob": topk > 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": section.get("mtp_num_layers") or 0,
    }

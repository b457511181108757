"""Type checks for the fields of a config.json that are read here.

Such files are edited by hand and written by many tools.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

LARGEST = 2**31 - 1
MANY = 2**16  # limit for experts or mixed layers, which need memory for each one


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_ids(value: Any) -> bool:
    return all(
        type(each) is int and 0 <= each <= LARGEST for each in (value if isinstance(value, list) else [value])
    )


_Rule = tuple[Callable[[Any], bool], str]
_SIZE: _Rule = (_is_size, f"a whole number from 1 to {LARGEST}")
_POSITIVE: _Rule = (_is_positive, "a finite number above 0")
_FLAG: _Rule = (lambda value: isinstance(value, bool), "true or false")
_TEXTS: _Rule = (_is_texts, "a list of texts")
_IDS: _Rule = (_is_ids, "a token id, or a list of them")
_COUNT: _Rule = (lambda value: type(value) is int and 1 <= value <= MANY, f"a whole number from 1 to {MANY}")
_COUNT_OR_NONE: _Rule = (
    lambda value: type(value) is int and 0 <= value <= MANY,
    f"a whole number from 0 to {MANY}",
)
_NUMBERS: _Rule = (
    lambda value: isinstance(value, list) and all(type(each) is int for each in value),
    "a list of whole numbers",
)
_OBJECT: _Rule = (lambda value: isinstance(value, dict), "an object")

_FIELDS: dict[str, _Rule] = {
    "architectures": _TEXTS,
    "hidden_size": _SIZE,
    "num_hidden_layers": _SIZE,
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE,
    "head_dim": _SIZE,
    "intermediate_size": _SIZE,
    "vocab_size": _SIZE,
    "max_position_embeddings": _SIZE,
    "rms_norm_eps": _POSITIVE,
    "rope_theta": _POSITIVE,
    "partial_rotary_factor": _POSITIVE,
    "tie_word_embeddings": _FLAG,
    "layer_types": _TEXTS,
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "quantization_config": _OBJECT,
    "compression_config": _OBJECT,
    "moe_intermediate_size": _SIZE,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), _COUNT),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "decoder_sparse_step"), _COUNT),
    "n_shared_experts": _COUNT_OR_NONE,
    "first_k_dense_replace": _COUNT_OR_NONE,
    "num_nextn_predict_layers": _COUNT_OR_NONE,
    "num_mtp_layers": _COUNT_OR_NONE,
    "mlp_only_layers": _NUMBERS,
    "norm_topk_prob": _FLAG,
    "routed_scaling_factor": _POSITIVE,
    "rope_interleave": _FLAG,
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), _SIZE
    ),
    "eos_token_id": _IDS,
    "bos_token_id": _IDS,
}
_ROPE: dict[str, _Rule] = {
    "rope_theta": _POSITIVE,
    "factor": _POSITIVE,
    "partial_rotary_factor": _POSITIVE,
}
_GROUPS: dict[str, _Rule] = {"config_groups": _OBJECT}
_GROUP: dict[str, _Rule] = {"weights": _OBJECT, "input_activations": _OBJECT}


def check_types(config: Mapping[str, Any], file: str = "config.json") -> None:
    """Raises ValueError naming the first used field with a wrong type; null is accepted."""
    _check(config, _FIELDS, file)
    for name in ("rope_scaling", "rope_parameters"):
        _check(config.get(name) or {}, _ROPE, f"{file}'s {name}")
    for name in ("quantization_config", "compression_config"):
        quantization = config.get(name) or {}
        _check(quantization, _GROUPS, f"{file}'s {name}")
        for group in (quantization.get("config_groups") or {}).values():
            if not isinstance(group, dict):
                raise ValueError(f"{file}'s {name} has config_groups of {group!r}: objects are needed.")
            _check(group, _GROUP, f"{file}'s {name}")


def _check(config: Mapping[str, Any], fields: Mapping[str, _Rule], where: str) -> None:
    for name, (fits, words) in fields.items():
        value = config.get(name)
        if value is not None and not fits(value):
            shown = repr(value)
            raise ValueError(
                f"{where} has {name}={shown[:60]}{'...' * (len(shown) > 60)}: {words} is needed."
            )

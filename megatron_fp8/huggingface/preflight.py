"""Checks before an import that training can build this model.

So an unsupported model fails before terabytes are written, and the message uses config.json's names.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from .architectures import Architecture
from .moe import names_of_experts

# Names in a model section -> names in config.json, if different.
_NAMES = {
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rope_scaling_factor": "factor",
    "rotary_scaling_factor": "factor",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "mtp_num_layers": "num_nextn_predict_layers",
}
# Remedies that change the config, which an existing model does not allow.
_REMEDY = re.compile(r"(: change it, or leave it \S+|\. Change one of them|: change one of them.*)\.$")


def check_buildable(run: dict[str, Any], architecture: Architecture) -> None:
    """Raises ValueError unless `megatron-fp8 train` accepts the run's config, as far as can be checked
    without data.

    Args:
        run: content of config.yaml.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, and those that training will repeat
            from ..train.config.model_section import transformer_config
            from ..train.config.run_config import parse

            transformer_config(parse([], base=run).model)
    except ValueError as error:
        message = _with_config_json_names(str(error), architecture)
        raise ValueError(
            f"config.json describes a model that Megatron-Core cannot build: {message}."
        ) from error


def _with_config_json_names(message: str, architecture: Architecture) -> str:
    names = {**_NAMES, **names_of_experts(architecture)}
    ours = "|".join(sorted(names, key=len, reverse=True))
    message = re.sub(rf"\b({ours})\b", lambda found: names[found[1]], _REMEDY.sub("", message))
    return message.replace("model.", "").rstrip(".")

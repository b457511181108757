"""A check before an import: can training build this model?

It is asked before terabytes are written, and answered in config.json's words.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

from .architectures import Architecture
from .mixture import names_of_experts

# A model section's names -> config.json's, where they differ.
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
# Remedies for whoever writes a config; a model that is there has the values that it has.
_REMEDY = re.compile(r"(: change it, or leave it \S+|\. Change one of them|: change one of them.*)\.$")


def check_buildable(run: dict[str, Any], architecture: Architecture) -> None:
    """Raise ValueError unless `megatron-fp8 train` takes the run's config, as far as no data are needed for it.

    Args:
        run: config.yaml's content.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries', and what training will say of its own
            from ..train.config.model_section import transformer_config
            from ..train.restore import run_of_values

            transformer_config(run_of_values(run, []).model)
    except ValueError as error:
        said = _in_words_of_the_directory(str(error), architecture)
        raise ValueError(f"config.json describes a model that Megatron-Core cannot build: {said}.") from error


def _in_words_of_the_directory(said: str, architecture: Architecture) -> str:
    names = {**_NAMES, **names_of_experts(architecture)}
    ours = "|".join(sorted(names, key=len, reverse=True))
    said = re.sub(rf"\b({ours})\b", lambda found: names[found[1]], _REMEDY.sub("", said))
    return said.replace("model.", "").rstrip(".")

"""Rules for the model section's position fields (GPTModel's, not its config's)."""

from __future__ import annotations

from typing import Any

from ...mcore.config.rules import FLAG, Rule, integer, number, one_of

POSITION_RULES: dict[str, Rule] = {
    "position_embedding_type": one_of("rope", "learned_absolute", "none"),
    "rotary_percent": number(0, 1, without=[0]),
    "rotary_base": integer(2, 2**53),
    "rope_scaling": FLAG,
    "rope_scaling_factor": number(1, 1e6),
}


def check_positions(section: Any, config: Any) -> None:
    """Raise ValueError if attention does not support the requested positions.

    Args:
        section: the model section.
        config: has the TransformerConfig's fields as attributes.
    """
    kind = section.position_embedding_type
    stages = config.pipeline_model_parallel_size
    if kind == "learned_absolute" and config.mtp_num_layers and stages > 1:
        raise ValueError(
            f"model.position_embedding_type='learned_absolute' with model.mtp_num_layers={config.mtp_num_layers} and"
            f" model.pipeline_model_parallel_size={stages}: Megatron-Core gives the last stage a table of positions of"
            " its own, which learns apart from the first one's. Take 'rope', or one stage."
        )
    if config.multi_latent_attention:
        if kind == "none":
            raise ValueError(
                "model.position_embedding_type='none' with model.multi_latent_attention=True: latent attention turns"
                " model.qk_pos_emb_head_dim channels of a head whatever it is. Leave it 'rope'."
            )
        return
    channels = config.kv_channels or config.hidden_size // config.num_attention_heads
    rotary_channels = int(channels * section.rotary_percent)
    if kind == "rope" and (rotary_channels < 2 or rotary_channels % 2):
        raise ValueError(
            f"model.rotary_percent={section.rotary_percent} of {channels} channels of a head (model.kv_channels) makes"
            f" {rotary_channels}, and rotary positions turn pairs: change one of them, or model.position_embedding_type."
        )

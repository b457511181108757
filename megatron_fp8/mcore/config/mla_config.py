"""`MLATransformerConfig`: multi-latent attention's config, with this package's FP8 fields.

DeepSeek-V2 and V3 compute attention through two low-rank projections. Hidden states are projected *down* to a latent
of queries and one of keys and values (`linear_q_down_proj`, `linear_kv_down_proj`), and *up* to heads
(`linear_q_up_proj`, `linear_kv_up_proj`): four FP8 linears in place of `linear_qkv`. A head's queries and keys have
`qk_head_dim` channels without positions and `qk_pos_emb_head_dim` with rotary ones, and all heads share the latter
for keys; a head's values have `v_head_dim` channels.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; the fields are Megatron-Core's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer import transformer_config as megatron_config

from .transformer_config import TransformerConfig, accept_fp8_format


@dataclass
class MLATransformerConfig(TransformerConfig, megatron_config.MLATransformerConfig):
    """Megatron-Core's `MLATransformerConfig` with FP8 that runs without Transformer Engine.

    Raises:
        ValueError: as `TransformerConfig`; or a size of latent attention is out of range or does not fit the layout.
    """

    # Repeated with Megatron-Core's defaults for latent attention: a dataclass takes those of its first base.
    multi_latent_attention: bool = True
    """Compute attention through latents of queries, keys and values."""
    normalization: str = "RMSNorm"
    """The norm of the layers, 'RMSNorm' or 'LayerNorm'."""


MLATransformerConfig.__init__ = accept_fp8_format(MLATransformerConfig.__init__)  # type: ignore[method-assign]

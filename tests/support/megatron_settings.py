"""A small TransformerConfig of this package, for tests of its fields."""

from __future__ import annotations

from typing import Any

from megatron_fp8.mcore.config.transformer_config import TransformerConfig

SIZES: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
FACTORY: dict[str, Any] = {"fp8_quantizer_factory": "os.path.join"}  # any importable callable


def make(**settings: Any) -> TransformerConfig:
    """The config with these settings."""
    return TransformerConfig(**SIZES, **settings)

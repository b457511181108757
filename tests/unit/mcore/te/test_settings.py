"""Settings that Transformer Engine would drop in silence are refused, each with what to do."""

from __future__ import annotations

import pytest

from megatron_fp8 import TransformerConfig

CONFIG = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "bf16": True,
    "fp8": "hybrid",
    "fp8_format": "tensorwise",
    "fp8_backend": "transformer_engine",
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"fp8_wgrad": False}, "no weight gradient in BF16"),
        ({"fp8_param": True}, "FP8 weights are this package's own"),
        ({"fp8_high_precision_warmup": 0.1}, "phases in BF16"),
        ({"fp8_high_precision_healing": 0.1}, "phases in BF16"),
        ({"num_moe_experts": 4}, "shares amaxes between ranks that hold different experts"),
        ({"fp8_overrides": {"*.linear_fc1": "mxfp8"}}, "one recipe for all layers"),
        ({"fp8_stochastic_rounding": True}, "does not round FP8 stochastically"),
        ({"fp8_format": "rowwise"}, "no rowwise recipe"),
        ({"fp8_format": "delayed", "fp8_amax_epsilon": 1e-6}, "no amax epsilon"),
        ({"fp8_format": "delayed", "fp8_interval": 2}, "every iteration, not every 2"),
        ({"fp8_margin": 1}, "no margin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_te_would_drop_are_refused(fields, says):
    with pytest.raises(ValueError, match="fp8_backend='transformer_engine'") as caught:
        TransformerConfig(**{**CONFIG, **fields})
    assert says in str(caught.value) and "fp8_backend='native'" in str(caught.value)


def test_settings_that_te_honours_are_accepted():
    config = TransformerConfig(
        **CONFIG, fp8_overrides={"*.linear_fc1": "bf16"}, fp8_pow2_scales=True, fp8_amax_epsilon=1e-6,
        first_last_layers_bf16=True, num_layers_at_end_in_bf16=0,
    )  # fmt: skip
    assert config.fp8_backend == "transformer_engine"

"""Patches for routers with expert biases, and with balancing over a whole batch.

After each batch Megatron-Core raises an expert's bias if it got fewer tokens than the mean, and lowers it if it got
more (DeepSeek-V3's balance without a loss, arXiv:2408.15664). Two things are wrong with it:

* It updates biases while gradients are finalised, before it is known whether the step will run. A step that the
  optimizer skips, for a NaN or an overflow, has changed them nevertheless. Here they are restored
  (optimizer/loss_scaler.py).
* It counts tokens in a buffer that Float16Module rounds to the model's dtype: from 256 on BF16 loses odd counts, from
  512 on a single token, and the result depends on micro-batches and ranks. Here counts are float32, exact to 2^24
  tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..runtime import Fp8Runtime, runtime_of
from .patching import Patch

_COUNTS = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")


def patches() -> list[Patch]:
    """Returns patches for the update of biases, and for the dtype of the counts."""
    return [
        Patch(
            "megatron.core.distributed.finalize_model_grads",
            "_update_router_expert_bias",
            remember_biases,
            "experts' biases are updated before it is known whether the step is skipped",
            wrap=True,
        ),
        Patch(
            "megatron.core.transformer.moe.router.TopKRouter",
            "_maintain_float32_expert_bias",
            count_in_float32,
            "tokens are counted in the model's dtype, which loses some of them",
            wrap=True,
        ),
    ]


def remember_biases(original: Callable[..., None]) -> Callable[..., None]:
    """Wraps _update_router_expert_bias: saves the old biases until the optimizer decides whether it steps."""

    @functools.wraps(original)
    def update(model: list[Any], config: Any) -> None:
        biases = [
            bias
            for chunk in model
            for module in chunk.modules()
            if (bias := getattr(module, "expert_bias", None)) is not None
        ]
        runtime_of(config).moved_biases = [(bias, bias.clone()) for bias in biases]
        original(model, config)

    return update


def settle_biases(runtime: Fp8Runtime, *, skipped: bool) -> None:
    """Restores the biases of a runtime's models if the step after their update was skipped."""
    saved, runtime.moved_biases = runtime.moved_biases, []
    for bias, before in saved if skipped else []:
        bias.copy_(before)


def count_in_float32(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps _maintain_float32_expert_bias: makes the token counts float32 too."""

    @functools.wraps(original)
    def maintain(self: Any) -> None:
        original(self)
        for name in _COUNTS:
            counts = getattr(self, name, None)
            if counts is not None and counts.dtype != torch.float32:
                counts.data = counts.data.float()

    return maintain

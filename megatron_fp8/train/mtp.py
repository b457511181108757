"""The loss of multi-token prediction, for reports."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def take_mtp_loss(microbatches: int, device: torch.device) -> float:
    """Return the mean loss per token, in nats, over the iteration's micro-batches and the tokens ahead, and reset it.

    Collective over all ranks, after the iteration's forward passes; some pipeline stage must have the layers. NaN and
    Inf are passed through.

    Args:
        microbatches: number in one iteration on one rank.
        device: device for collectives.
    """
    layer_sums = MTPLossLoggingHelper.tracker.get("values")
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if layer_sums is not None:  # float32 [mtp_num_layers], the sums over micro-batches
        sums[0], sums[1] = layer_sums.double().mean() / microbatches, 1.0
        MTPLossLoggingHelper.tracker.clear()
    dist.all_reduce(sums)
    total, ranks = sums.tolist()
    assert ranks, "mtp_num_layers without layers is refused before the first step"
    return total / ranks

"""CapturedIteration: what a replay, which runs no hook, does on the host."""

from __future__ import annotations

from typing import Any

import torch

from megatron_fp8 import TransformerConfig
from megatron_fp8.linear.gemm_site import is_zeros, mark_zeros
from megatron_fp8.mcore.iteration import CapturedIteration


def test_a_replay_ends_the_marks_of_zeros() -> None:
    """It filled the buffers, so an eager backward that follows has to add."""
    chunk: Any = torch.nn.Linear(8, 4)
    chunk.config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, fp8="hybrid")
    weight: Any = chunk.weight
    for parameter in chunk.parameters():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False
    captured = CapturedIteration([chunk])
    with captured:
        mark_zeros(chunk.parameters(), captured=True)
        assert is_zeros(weight, captured=True)
    mark_zeros(chunk.parameters())  # as DistributedDataParallel's buffers are zeroed for the iteration
    assert is_zeros(weight, captured=False) and is_zeros(chunk.bias, captured=False)
    captured.replayed()
    for parameter in chunk.parameters():
        assert not is_zeros(parameter, captured=False) and not is_zeros(parameter, captured=True)

"""What a rank exchanges: groups of different sizes are different lines; what a collective costs a rank."""

from __future__ import annotations

from megatron_fp8.estimate.communication import of_stage
from megatron_fp8.estimate.communication_linear import Traffic
from megatron_fp8.estimate.settings import read
from megatron_fp8.estimate.sites import Plans


def test_dense_layers_and_experts_have_amax_groups_of_their_own_sizes():
    settings = read(["--config=deepseek_v3"], gpus=2048)
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == 1]
    found = {
        one.ranks: one.calls
        for one in of_stage(settings, chunks, Plans(settings.model))
        if one.axis == "amax"
    }
    assert found == {128: 1, 2: 1}


def test_a_ring_sends_a_part_to_each_step():
    """Twice for an all-reduce; over a thousand ranks bytes hardly grow, and messages do."""
    for ranks in (2, 1024):
        gather = Traffic("x", "all-gather", "data", ranks, 1024, calls=3)
        assert (gather.sent, gather.messages) == (1024 - 1024 // ranks, 3 * (ranks - 1))
        reduced = Traffic("x", "all-reduce", "data", ranks, 1024, calls=3)
        assert (reduced.sent, reduced.messages) == (2 * gather.sent, 2 * gather.messages)
    assert Traffic("x", "send", "pipeline", 2, 1024, calls=3).messages == 3

"""What a rank exchanges: groups of different sizes are different lines; what a collective costs a rank. Trainings and
simulated worlds hold the rest (test_estimate.py, test_scaling.py)."""

from megatron_fp8.estimate.communication import stage_traffic
from megatron_fp8.estimate.config_reader import read
from megatron_fp8.estimate.linear_communication import Traffic


def test_dense_layers_and_experts_have_amax_groups_of_their_own_sizes():
    settings = read(["--config=deepseek_v3"], gpus=2048)
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == 1]
    found = {one.ranks: one.calls for one in stage_traffic(settings, chunks) if one.axis == "amax"}
    assert found == {128: 1, 2: 1}


def test_a_ring_sends_a_part_to_each_step():
    """Twice for an all-reduce."""
    for ranks in (2, 1024):
        gather = Traffic("x", "all-gather", "data", ranks, 1024, calls=3)
        assert gather.sent == 1024 - 1024 // ranks
        assert Traffic("x", "all-reduce", "data", ranks, 1024, calls=3).sent == 2 * gather.sent

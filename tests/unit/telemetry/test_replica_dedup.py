"""Each element counts once: who counts what, of replicas, shards and parts."""

from __future__ import annotations

from megatron_fp8.linear.tensor_parallel import ShardInfo
from megatron_fp8.telemetry.replica_dedup import Counts, agree


def shared(kind, tp):
    rank = _rank()
    return agree({"fc": ShardInfo(kind, rank % tp, rank // tp), f"own{rank}": ShardInfo()}, _world())


def _rank():
    import torch.distributed as dist

    return dist.get_rank()


def _world():
    import torch.distributed as dist

    return dist.group.WORLD


def test_alone_everything_counts():
    agreed = agree({"fc": ShardInfo()}, None)
    assert agreed.sites == ("fc",) and agreed.mine == {"fc": Counts("none", True, True)}
    assert all(agreed.mine["fc"].counts(tensor, shard=False) for tensor in ("input", "weight", "grad_output"))


def test_the_first_of_those_that_hold_the_same_counts(ranks):
    """Four ranks, two by two: each part of the weight once, what tensor-parallel ranks share once for all tokens."""
    found = ranks(4).run(shared, "column", 2)
    assert [agreed.sites for agreed in found] == [("fc", "own0", "own1", "own2", "own3")] * 4
    counts = [agreed.mine["fc"] for agreed in found]
    assert [c.counts("weight", shard=False) for c in counts] == [True, True, False, False]
    assert [c.counts("input", shard=False) for c in counts] == [True, False, True, False]
    assert [c.counts("input", shard=True) for c in counts] == [True] * 4
    assert [c.counts("grad_output", shard=False) for c in counts] == [True] * 4
    rows = [agreed.mine["fc"] for agreed in ranks(4).run(shared, "row", 2)]
    assert [c.counts("input", shard=False) for c in rows] == [True] * 4
    assert [c.counts("grad_output", shard=False) for c in rows] == [True, False, True, False]

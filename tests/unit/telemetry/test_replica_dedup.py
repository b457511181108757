"""Each element counts once: who counts what, of replicas, shards and parts."""

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
    """Each part of a weight once, what tensor-parallel ranks share once for all tokens."""
    both = (True, True), (True, False)
    found = ranks(2).run(shared, "column", 2)
    assert [agreed.sites for agreed in found] == [("fc", "own0", "own1")] * 2

    def counts(kind, tp, tensor, shard=False):
        return tuple(a.mine["fc"].counts(tensor, shard=shard) for a in ranks(2).run(shared, kind, tp))

    assert (counts("column", 2, "weight"), counts("column", 2, "input")) == both
    assert counts("column", 2, "input", shard=True) == counts("column", 2, "grad_output") == (True, True)
    assert (counts("row", 2, "input"), counts("row", 2, "grad_output")) == both
    assert (counts("column", 1, "input"), counts("column", 1, "weight")) == both, "replicas with own tokens"

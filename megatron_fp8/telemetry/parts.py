"""Who counts what: each element of a site's tensors once, though ranks hold replicas, shards and parts of it.

Every rank says of each of its sites which part of the weight it holds and which tokens it sees (linear/share.py). Of
ranks that say the same, the first counts what they all hold. That is all there is to tensor, sequence, context, data,
expert and pipeline parallelism: nobody names a group, and one collective over all ranks adds up everything.
Rejected: a reduction over each kind of group in turn, as Transformer Engine has it set up by hand: more collectives, and
a figure is wrong by a factor where a group is missing or one too many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..linear.share import Share


@dataclass(frozen=True)
class Counts:
    """What one rank counts of a site.

    Attributes:
        kind: as Share's.
        weight: it counts its part of the weight.
        tokens: it counts what all tensor-parallel ranks hold of its tokens.
    """

    kind: str
    weight: bool
    tokens: bool

    def counts(self, tensor: str, *, shard: bool) -> bool:
        """Whether this rank counts what it has of 'input', 'weight' or 'grad_output'.

        ``shard``: it has only its own tokens of what would else be the same on all tensor-parallel ranks.
        """
        if tensor == "weight":
            return self.weight
        replicated = (self.kind, tensor) in (("column", "input"), ("row", "grad_output"))
        return self.tokens or shard or not replicated


@dataclass(frozen=True)
class Agreed:
    """What all ranks know of the model: the site of each row of a table, in one order, and what this rank counts.

    Attributes:
        sites: the names of all sites of all ranks.
        mine: of this rank's sites.
        rank: in the group.
    """

    sites: tuple[str, ...]
    mine: Mapping[str, Counts]
    rank: int


def agree(shares: Mapping[str, Share], group: Any) -> Agreed:
    """What ranks that have these sites count. Collective over the group; None: this process alone."""
    everyone: list[Any] = [dict(shares)]
    rank = 0
    if group is not None:
        rank, everyone = dist.get_rank(group), [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, dict(shares), group=group)
    before = everyone[:rank]

    def first(name: str, field: str) -> bool:
        value = getattr(shares[name], field)
        return all(name not in other or getattr(other[name], field) != value for other in before)

    mine = {
        name: Counts(share.kind, first(name, "part"), first(name, "tokens")) for name, share in shares.items()
    }
    return Agreed(tuple(dict.fromkeys(name for part in everyone for name in part)), mine, rank)

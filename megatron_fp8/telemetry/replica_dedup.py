"""Deduplicates tensors over ranks: each shard counts once among replicas.

Each rank has, for each of its sites, a part of the weight and a set of tokens
(linear/tensor_parallel.py). Of ranks with the same part or tokens, the first one counts. This covers tensor, sequence,
context, data, expert and pipeline parallelism without process groups, and one collective over all ranks sums
everything.
Rejected: one reduction per kind of group, as set up by hand for Transformer Engine. It needs more
collectives, and values are wrong by a factor if a group is missing or extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..linear.tensor_parallel import ShardInfo
from ..state.collectives import device_of, size, union


@dataclass(frozen=True)
class Counts:
    """What this rank counts for a site.

    Attributes:
        kind: as in Share.
        weight: it counts its part of the weight.
        tokens: it counts the replicated tensors of its tokens.
    """

    kind: str
    weight: bool
    tokens: bool

    def counts(self, tensor: str, *, shard: bool) -> bool:
        """Whether this rank counts its 'input', 'weight' or 'grad_output'.

        ``shard``: the tensor contains this rank's own tokens only, instead of a replica on all
        tensor-parallel ranks.
        """
        if tensor == "weight":
            return self.weight
        replicated = (self.kind, tensor) in (("column", "input"), ("row", "grad_output"))
        return self.tokens or shard or not replicated


@dataclass(frozen=True)
class RankAgreement:
    """The ranks' agreement on a model: site order in tables, and what this rank counts.

    Attributes:
        sites: names of all sites of all ranks.
        mine: what this rank counts, for its own sites.
        rank: this rank in the group.
    """

    sites: tuple[str, ...]
    mine: Mapping[str, Counts]
    rank: int


def agree(shares: Mapping[str, ShardInfo], group: Any) -> RankAgreement:
    """Decides what each rank counts of its sites. Collective over the group; None: this process only.

    The sites of a rank have few distinct shares, usually one for dense layers and one for experts. So ranks
    exchange the names, then the sets of sites with the same share, and then, in one all-reduce, the first
    rank with a given part, or tokens, of each set. No message grows with ranks times sites.
    """
    if group is None or size(group) == 1:
        return RankAgreement(
            tuple(shares), {name: Counts(share.kind, True, True) for name, share in shares.items()}, 0
        )
    rank = dist.get_rank(group)
    sites = tuple(union(dict.fromkeys(shares), group))
    number = {name: index for index, name in enumerate(sites)}
    sites_by_share: dict[tuple[int, int], list[int]] = {}
    for name, share in shares.items():
        sites_by_share.setdefault((share.part, share.tokens), []).append(number[name])
    mine = {(part, tokens): tuple(numbers) for (part, tokens), numbers in sites_by_share.items()}
    sets = list(union(dict.fromkeys(mine.values()), group))
    parts = _first_ranks(sets, [(numbers, part) for (part, _), numbers in mine.items()], group)
    tokens = _first_ranks(sets, [(numbers, tokens) for (_, tokens), numbers in mine.items()], group)
    sets_of_site: dict[int, list[int]] = {}
    for index, numbers in enumerate(sets):
        for site_index in numbers:
            sets_of_site.setdefault(site_index, []).append(index)

    def first(table: torch.Tensor, name: str, column: int) -> bool:
        return int(table[sets_of_site[number[name]], column].min()) == rank

    counts = {
        name: Counts(share.kind, first(parts, name, share.part), first(tokens, name, share.tokens))
        for name, share in shares.items()
    }
    return RankAgreement(sites, counts, rank)


def _first_ranks(
    sets: list[tuple[int, ...]], mine: list[tuple[tuple[int, ...], int]], group: Any
) -> torch.Tensor:
    """int64 [sets, numbers] on the CPU: the lowest rank with this number (of a part, or of tokens) for a set of sites.
    ``mine``: this rank's sets with their numbers."""
    device, columns = device_of(group), 1 + max((column for _, column in mine), default=0)
    width = torch.tensor([columns], dtype=torch.int64, device=device)
    dist.all_reduce(width, op=dist.ReduceOp.MAX, group=group)
    table = torch.full((len(sets), int(width)), size(group), dtype=torch.int64, device="cpu")
    row = {numbers: index for index, numbers in enumerate(sets)}
    for numbers, column in mine:
        table[row[numbers], column] = dist.get_rank(group)
    table = table.to(device)
    dist.all_reduce(table, op=dist.ReduceOp.MIN, group=group)
    return table.cpu()

"""Each rank's part of a tensor, counted once among replicas and shards.

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

import torch
import torch.distributed as dist

from ..linear.share import Share
from ..state.ranks import device_of, size, union


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
    """What ranks that have these sites count. Collective over the group; None: this process alone.

    A rank's sites have few shares among them, most often one for dense layers and one for experts. So ranks agree on the
    names, then on the sets of sites that have one share on some rank, and then, in one all-reduce, on the first rank that
    has a part, or tokens, of each set: none of it grows with the number of ranks times that of sites.
    """
    if group is None or size(group) == 1:
        return Agreed(
            tuple(shares), {name: Counts(share.kind, True, True) for name, share in shares.items()}, 0
        )
    rank = dist.get_rank(group)
    sites = tuple(union(dict.fromkeys(shares), group))
    number = {name: index for index, name in enumerate(sites)}
    together: dict[tuple[int, int], list[int]] = {}
    for name, share in shares.items():
        together.setdefault((share.part, share.tokens), []).append(number[name])
    mine = {(part, tokens): tuple(numbers) for (part, tokens), numbers in together.items()}
    sets = list(union(dict.fromkeys(mine.values()), group))
    parts = _first_ranks(sets, [(numbers, part) for (part, _), numbers in mine.items()], group)
    tokens = _first_ranks(sets, [(numbers, tokens) for (_, tokens), numbers in mine.items()], group)
    holding: dict[int, list[int]] = {}
    for index, numbers in enumerate(sets):
        for one in numbers:
            holding.setdefault(one, []).append(index)

    def first(table: torch.Tensor, name: str, column: int) -> bool:
        return int(table[holding[number[name]], column].min()) == rank

    counts = {
        name: Counts(share.kind, first(parts, name, share.part), first(tokens, name, share.tokens))
        for name, share in shares.items()
    }
    return Agreed(sites, counts, rank)


def _first_ranks(
    sets: list[tuple[int, ...]], mine: list[tuple[tuple[int, ...], int]], group: Any
) -> torch.Tensor:
    """int64 [sets, numbers] on the CPU: the lowest rank that has this number (of a part, or of tokens) of a set of sites.
    ``mine``: the sets that this rank has, each with its number."""
    device, most = device_of(group), 1 + max((column for _, column in mine), default=0)
    width = torch.tensor([most], dtype=torch.int64, device=device)
    dist.all_reduce(width, op=dist.ReduceOp.MAX, group=group)
    table = torch.full((len(sets), int(width)), size(group), dtype=torch.int64, device="cpu")
    row = {numbers: index for index, numbers in enumerate(sets)}
    for numbers, column in mine:
        table[row[numbers], column] = dist.get_rank(group)
    table = table.to(device)
    dist.all_reduce(table, op=dist.ReduceOp.MIN, group=group)
    return table.cpu()

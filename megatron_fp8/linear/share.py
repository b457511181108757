"""Which part of a site one rank has: its part of the weight, and its tokens. What adds up figures of ranks asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Share:
    """A rank's part of one site.

    Attributes:
        kind: 'column' or 'row' where the weight is split over tensor-parallel ranks, by output or by input features.
        part: which part of the weight; ranks with the same number hold the same values.
        tokens: which tokens; ranks with the same number see the same ones, or shards of the same.
    """

    kind: Literal["none", "column", "row"] = "none"
    part: int = 0
    tokens: int = 0


def weight_of(linear: Any) -> torch.Tensor:
    """The weight that a linear's site multiplies by: its own, or the one that it is tied to and given with each call."""
    weight: torch.Tensor = linear.tied_weight if linear.weight is None else linear.weight
    return weight

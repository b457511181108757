"""Which part of a site one rank has: its part of the weight, and its tokens. What adds up figures of ranks asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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

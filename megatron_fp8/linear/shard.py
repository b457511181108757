"""The shard of a site's weight and tokens that this rank holds, for sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ShardInfo:
    """A rank's shard of one site.

    Attributes:
        kind: 'column' or 'row' where the weight is split over tensor-parallel ranks, by output or by input features.
        part: the weight shard's number; ranks with the same number hold the same values.
        tokens: the token set's number; ranks with the same number see the same tokens, or shards of them.
    """

    kind: Literal["none", "column", "row"] = "none"
    part: int = 0
    tokens: int = 0


def weight_of(linear: Any) -> torch.Tensor:
    """A linear's weight [N, K]: its own, or the tied weight that each call passes."""
    own: torch.Tensor | None = linear.weight
    weight: torch.Tensor = linear.tied_weight if own is None else own
    return weight


def device_of(linear: Any) -> torch.device:
    """The device of a linear's weight; ``fp8_device`` avoids computing a parametrised weight."""
    device: torch.device | None = getattr(linear, "fp8_device", None)
    return weight_of(linear).device if device is None else device

"""This rank's part of a site: of its weight, and of its tokens. Sums over ranks ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ShardInfo:
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
    own: torch.Tensor | None = linear.weight
    weight: torch.Tensor = linear.tied_weight if own is None else own
    return weight


def device_of(linear: Any) -> torch.device:
    """Where that weight is; nn's, which may be computed, say so without it."""
    device: torch.device | None = getattr(linear, "fp8_device", None)
    return weight_of(linear).device if device is None else device

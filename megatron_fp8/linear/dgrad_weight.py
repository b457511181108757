"""dgrad's codes of a weight, made again in backward.

A forward that keeps no columnwise side, or whose side somebody else may replace before the backward runs (compiled
code, offloading, another forward), saves a stamp: which state of the weight it quantised, and by which delayed scale.
Rejected: an argument more of the backward's operator, which graphs that torch.compile has kept on the disk since an
earlier version of this package would not give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..tensor import Operand
from .weight_cache import CachedWeight, WeightCache

_DELAYED, _EVALUATED = 1, 2  # a stamp's flags


def stamp_of(
    weights: WeightCache, device: torch.device, *, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What backward needs to know of a forward that has just quantised the weight, as tensors that a graph can save.

    (int64 [2] on the CPU: the weight_generation, and flags: a delayed scale was used, it was in evaluation; float32 []:
    that scale, or 1.)
    """
    facts, scale = _facts(weights, training)
    stamp = torch.tensor(facts, dtype=torch.int64, device="cpu")
    used = torch.ones((), dtype=torch.float32, device=device) if scale is None else scale.clone()
    return stamp, used


def stamps_of(
    weights: Sequence[WeightCache], device: torch.device, *, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``stamp_of`` of each, in two tensors: int64 [experts, 2] on the CPU, float32 [experts]."""
    facts = [_facts(cache, training) for cache in weights]
    stamps = torch.tensor([stamp for stamp, _ in facts], dtype=torch.int64, device="cpu")
    used = torch.ones(len(facts), dtype=torch.float32, device=device)
    if any(scale is not None for _, scale in facts):
        parts = [
            one if scale is None else scale for one, (_, scale) in zip(used.unbind(), facts, strict=True)
        ]
        used = torch.stack(parts)
    return stamps, used


def _facts(weights: WeightCache, training: bool) -> tuple[list[int], torch.Tensor | None]:
    """(a stamp, the delayed scale that was used)"""
    scale = None if weights.held is None else weights.held.scale
    flags = _DELAYED * (scale is not None) + _EVALUATED * (not training)
    return [weights.state.weight_generation, flags], scale


def was_training(stamp: torch.Tensor) -> bool:
    """Whether the forward that made this stamp was one of training."""
    return not int(stamp[1]) & _EVALUATED


def columnwise_of(
    weights: WeightCache, weight: torch.Tensor, stamp: torch.Tensor, scale: torch.Tensor
) -> Operand:
    """dgrad's operand [K, N] of the weight [N, K] that backward hands back.

    It is what forward made of the weight, if that is still here. Else it is made again, with the same bits: the state
    keeps no columnwise sides, ``fp8_step`` or another forward came in between, or offloading brought the weight back
    as another tensor.

    Args:
        stamp, scale: the forward's.
    """
    quantizer = weights.casts.columnwise
    if quantizer is None:
        return weight.t()
    weight_generation, flags = stamp.tolist()
    kept = still_held(weights, weight, weight_generation, flags)
    side = None if kept is None else kept.quantized.columnwise
    if side is None:
        side = quantizer.again(weight, "columnwise", scale if flags & _DELAYED else None).columnwise
    assert side is not None
    return side


def still_held(
    weights: WeightCache, weight: torch.Tensor, generation: int, flags: int
) -> CachedWeight | None:
    """What the forward with this stamp made of the weight, or another one with the same scale, if that is still here."""
    kept = weights.held
    if kept is None or kept.fitted != weights.fits(training=not flags & _EVALUATED):
        return None
    return kept if kept.version == weights.version(weight, generation) else None

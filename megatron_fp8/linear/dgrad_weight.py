"""Columnwise weight codes for dgrad, quantised again in backward.

A forward saves a stamp if it keeps no columnwise side, or if that may be replaced before backward (compiled code,
offloading, another forward). The stamp names the weight's generation and the delayed scale.
Rejected: one more argument of the backward operator. Graphs that torch.compile cached on disk under an earlier version
of this package would not pass it.
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
    """The stamp of a forward that just quantised the weight, as tensors that a graph can save.

    Returns (int64 [2] on the CPU: weight_generation and flags for a delayed scale and evaluation; float32 []: the delayed
    scale, or 1).
    """
    facts, scale = _facts(weights, training)
    stamp = torch.tensor(facts, dtype=torch.int64, device="cpu")
    used = torch.ones((), dtype=torch.float32, device=device) if scale is None else scale.clone()
    return stamp, used


def stamps_of(
    weights: Sequence[WeightCache], device: torch.device, *, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``stamp_of`` of each expert, stacked: int64 [experts, 2] on the CPU, float32 [experts]."""
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
    """(stamp, delayed scale float32 [] or None)."""
    scale = None if weights.held is None else weights.held.scale
    flags = _DELAYED * (scale is not None) + _EVALUATED * (not training)
    return [weights.state.weight_generation, flags], scale


def was_training(stamp: torch.Tensor) -> bool:
    """Whether the forward of this stamp, int64 [2], ran in training mode."""
    return not int(stamp[1]) & _EVALUATED


def columnwise_of(
    weights: WeightCache, weight: torch.Tensor, stamp: torch.Tensor, scale: torch.Tensor
) -> Operand:
    """dgrad's operand [K, N] of the weight [N, K].

    Returns forward's codes while the site caches them. Otherwise quantises the weight again, with the same bits: the
    state keeps no columnwise sides, ``fp8_step`` or another forward ran in between, or offloading returned the weight as
    another tensor.

    Args:
        stamp, scale: int64 [2] and float32 [] of the forward's ``stamp_of``.
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
    """The cached codes of the weight [N, K] from the forward with this stamp, or from one with its scale; else None."""
    kept = weights.held
    if kept is None or kept.fitted != weights.fits(training=not flags & _EVALUATED):
        return None
    return kept if kept.version == weights.version(weight, generation) else None

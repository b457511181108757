"""The reference quantizer on any device: amaxes, scales and codes, one or both directions.

The backends use it for casts without a C or Triton kernel. Elements are cast by kernels/cast_dispatch.py, in C where that
is faster.

A columnwise side is a transposed view of codes in the original layout: no copy, and shards gathered along the rows need
no permutation.
"""

from __future__ import annotations

import torch

from ..kernels import cast_dispatch
from ..kernels.cast_dispatch import in_memory
from ..numerics.cast import cast_stochastic
from ..numerics.rule import Granularity, Rule
from ..numerics.scaling import compute_scale, compute_scale_inv
from ..numerics.subnormals import keep_subnormals
from ..tensor import Float8Tensor, QuantizedSide, expand_scale
from . import fp4
from .base import CastRequest, CastResult, Region


@keep_subnormals
def quantize(request: CastRequest) -> CastResult:
    """Quantize a matrix in one or both directions. ValueError if its dtype is none of CastRequest's."""
    x, rule, direction, scale, running, reduce_amax, region, _ = request
    if rule.scale == "e4m3":
        return fp4.quantize(request)
    x = in_memory(x).contiguous()
    granularity = rule.granularity
    wants_row, wants_column = direction != "columnwise", direction != "rowwise"
    once = granularity.symmetric  # one cast serves both directions
    # The blocks (rows, columns; 0: the whole extent) of each needed cast: along columns, along rows.
    cuts = [(granularity.rows, granularity.cols)] if wants_row or once else []
    if wants_column and not once:
        cuts.append((granularity.cols, granularity.rows))
    amaxes, nonfinite = cast_dispatch.block_amaxes(x, cuts)  # of each cut [blocks down, blocks across]
    amax = amaxes[0].amax() if amaxes[0].numel() else torch.zeros((), device=x.device, dtype=torch.float32)

    def coded(cut: tuple[int, int], block_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes [rows, cols], scale_inv [blocks down, blocks across], or [] per tensor), both in x's orientation."""
        if granularity.is_tensor:
            block_amax = amax  # [], not [1, 1]
            if scale is None and reduce_amax is not None:
                block_amax = amax.clone()
                reduce_amax(block_amax)
        elif cut[0] == 0 and reduce_amax is not None:  # whole columns, of which a shard of rows holds a part
            reduce_amax(block_amax)
        block_scale, scale_inv = (
            block_scales(block_amax, rule) if scale is None else (scale, compute_scale_inv(scale))
        )
        # With x's own amax only Inf saturates. A shared scale may be 1, if another rank has an Inf.
        bounded = scale is None and nonfinite is None and reduce_amax is None
        return cast_blocks(x, block_scale, cut, rule, bounded, region), scale_inv

    rowwise = columnwise = None
    pow2, finite = rule.pow2, nonfinite is None
    made, scale_inv = coded(cuts[0], amaxes[0])
    if wants_row:
        rowwise = QuantizedSide(made, scale_inv, granularity, pow2, finite)
    if wants_column:
        if wants_row and not once:
            made, scale_inv = coded(cuts[1], amaxes[1])
        turned_scale = scale_inv if granularity.is_tensor else scale_inv.t()
        columnwise = QuantizedSide(made.t(), turned_scale, granularity, pow2, finite)  # [cols, rows]
    if running is not None:
        running.record(amax, nonfinite)
    return CastResult(Float8Tensor(rowwise, columnwise, x.dtype), amax, nonfinite)


def block_scales(amax: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 scale, stored scale_inv) of the rule's kind."""
    if rule.scale == "e8m0":
        exponent = cast_dispatch.compute_e8m0(amax, rule.fmt)
        return cast_dispatch.e8m0_to_scale(exponent), exponent.view(torch.float8_e8m0fnu)
    scale = compute_scale(amax, rule.fmt, margin=rule.margin, epsilon=rule.epsilon, pow2=rule.scale == "pow2")
    return scale, compute_scale_inv(scale)


def cast_blocks(
    x: torch.Tensor,
    scale: torch.Tensor,
    cut: tuple[int, int],
    rule: Rule,
    bounded: bool,
    region: Region | None,
) -> torch.Tensor:
    """Codes [rows, cols] of x with one scale per block of ``cut`` (rows, cols; 0: the whole extent)."""
    if rule.stochastic:
        assert region is not None, "stochastic rounding needs a region to draw its bits from"
        per_element = _expand_any(scale, Granularity(*cut), x.shape)
        index = region.index(x.shape[0], x.shape[1], x.device)
        return cast_stochastic(x, per_element, rule.fmt, region.key, index=index)
    if rule.granularity.is_tensor:
        return cast_dispatch.cast(x, scale, rule.fmt, bounded=bounded)
    return cast_dispatch.cast_blocks(x, scale, cut[0], cut[1], rule.fmt, bounded=bounded)


def _expand_any(scale: torch.Tensor, granularity: Granularity, shape: torch.Size) -> torch.Tensor:
    """expand_scale for either orientation of blocks (whole rows or whole columns too)."""
    if granularity.rows == 0 and not granularity.is_tensor:
        return expand_scale(scale.t(), Granularity(granularity.cols, 0), (shape[1], shape[0])).t()
    return expand_scale(scale, granularity, shape)

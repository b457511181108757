"""Quantising as specified, on any device: amaxes, scales and codes of a matrix in one or both directions.

The emulated backend has nothing else; the native one has it for what no Triton kernel does. Elements go through
kernels/codes.py, in C where that is faster.

A columnwise side is kept as the transposed view of codes in the original layout: nothing is copied to transpose, and
shards gathered along the rows need no permutation.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..kernels import codes, in_memory
from ..numerics.cast import cast_stochastic
from ..numerics.scaling import compute_scale, compute_scale_inv
from ..numerics.subnormals import keeping_subnormals
from ..recipe import Granularity, Rule
from ..tensor import Float8Tensor, QuantizedSide, expand_scale
from .base import AmaxReduction, Direction, Quantized, Region, check_matrix


@keeping_subnormals
def quantize(
    x: torch.Tensor,
    rule: Rule,
    direction: Direction,
    *,
    scale: torch.Tensor | None = None,
    reduce_amax: AmaxReduction | None = None,
    region: Region | None = None,
) -> Quantized:
    """Quantise a matrix in one or both directions.

    Args:
        x: [rows, cols], float32, bfloat16 or float16; any strides; may be empty. NaN becomes 0x7F, Inf saturates; both
            are counted, and neither makes a scale non-finite.
        rule: format, granularity, scale kind.
        direction: 'rowwise', 'columnwise' or 'both'.
        scale: float32 [], given from outside (delayed scaling); None computes it from x.
        reduce_amax: shares over ranks those amaxes that a shard's rows are cut through: the tensor's, and the
            columnwise side's of per-row scales.
        region: place and random stream for stochastic rounding, needed if rule.stochastic.

    Raises:
        ValueError: x is not a matrix of a floating dtype, or direction is unknown.
    """
    check_matrix(x, direction)
    x = in_memory(x).contiguous()
    wants_row, wants_column = direction != "columnwise", direction != "rowwise"
    granularity = rule.granularity
    along_cols = [granularity] if wants_row or granularity.symmetric else []
    along_rows = (
        [Granularity(granularity.cols, granularity.rows)]
        if wants_column and not granularity.symmetric
        else []
    )
    amaxes, nonfinite = codes.block_amaxes(x, [(g.rows, g.cols) for g in along_cols + along_rows])
    amax = amaxes[0].amax() if amaxes[0].numel() else torch.zeros((), device=x.device, dtype=torch.float32)

    def side(granularity: Granularity, block_amax: torch.Tensor, by_column: bool) -> QuantizedSide:
        if granularity.is_tensor:
            block_amax = amax
            if scale is None and reduce_amax is not None:
                block_amax = amax.clone()
                reduce_amax(block_amax)
        elif by_column and granularity.rows == 0 and reduce_amax is not None:
            reduce_amax(block_amax)
        block_scale, scale_inv = (
            block_scales(block_amax, rule) if scale is None else (scale, compute_scale_inv(scale))
        )
        # A scale made from x's own amax, or from a greater one, lets nothing saturate but an Inf.
        bounded = scale is None and nonfinite is None
        codes = cast_blocks(x, block_scale, granularity, rule, bounded, region)
        return QuantizedSide(codes, scale_inv, granularity, rule.scale != "fp32", finite=nonfinite is None)

    rowwise = side(along_cols[0], amaxes[0], False) if along_cols else None
    columnwise = None
    if wants_column and granularity.symmetric:
        assert rowwise is not None
        columnwise = rowwise.transposed()
    elif wants_column:
        turned = side(along_rows[0], amaxes[-1], True)
        columnwise = replace(
            turned, codes=turned.codes.t(), scale_inv=turned.scale_inv.t(), granularity=granularity
        )
    return Quantized(Float8Tensor(rowwise if wants_row else None, columnwise, x.dtype), amax, nonfinite)


def block_scales(amax: torch.Tensor, rule: Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 scale, stored scale_inv) of the rule's kind."""
    if rule.scale == "e8m0":
        exponent = codes.compute_e8m0(amax, rule.fmt)
        return codes.e8m0_to_scale(exponent), exponent.view(torch.float8_e8m0fnu)
    scale = compute_scale(amax, rule.fmt, margin=rule.margin, epsilon=rule.epsilon, pow2=rule.scale == "pow2")
    return scale, compute_scale_inv(scale)


def cast_blocks(
    x: torch.Tensor,
    scale: torch.Tensor,
    granularity: Granularity,
    rule: Rule,
    bounded: bool,
    region: Region | None,
) -> torch.Tensor:
    """Codes [rows, cols] of x under one scale per block."""
    rows, cols = x.shape
    if rule.stochastic:
        assert region is not None, "stochastic rounding needs a region to draw its bits from"
        per_element = scale if granularity.is_tensor else _expand_any(scale, granularity, x.shape)
        return cast_stochastic(x, per_element, rule.fmt, region.key, index=region.index(rows, cols, x.device))
    if granularity.is_tensor:
        return codes.cast(x, scale, rule.fmt, bounded=bounded)
    return codes.cast_blocks(x, scale, granularity.rows, granularity.cols, rule.fmt, bounded=bounded)


def _expand_any(scale: torch.Tensor, granularity: Granularity, shape: torch.Size) -> torch.Tensor:
    """expand_scale for either orientation of blocks (whole rows or whole columns too)."""
    if granularity.rows == 0:
        return expand_scale(scale.t(), Granularity(granularity.cols, 0), (shape[1], shape[0])).t()
    return expand_scale(scale, granularity, shape)

"""CPU casts in C, of one matrix or many in one call. What C does not take goes through reference.py.

One call makes amaxes, scales and codes of both directions (kernels/cpu/casts.c). If ranks share amaxes, these are
measured and reduced first, in a separate call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from ..kernels.cpu import emulation, matrix_quantize
from ..numerics.rule import ROW, TENSOR, Direction, Granularity
from ..tensor import Float8Tensor, QuantizedSide
from . import reference
from .base import AmaxReduction, CastRequest, CastResult


def quantize_each(requests: Sequence[CastRequest]) -> list[CastResult]:
    """``reference.quantize`` of each request, all that C supports in one call."""
    inputs = [_cast_input(request) for request in requests]
    made = iter(matrix_quantize.quantize([one for one in inputs if one is not None]))
    return [
        reference.quantize(request) if one is None else _cast_result(request, next(made))
        for request, one in zip(requests, inputs, strict=True)
    ]


def _cast_input(request: CastRequest) -> matrix_quantize.CastInput | None:
    """The request for C; None if C does not support it."""
    x, rule, direction, scale, running, reduce_amax, *_ = request
    x = x.contiguous()
    if rule.stochastic or rule.scale == "e4m3" or x.dtype not in emulation.FLOATS or not emulation.usable(x):
        return None
    cuts = _cuts(rule.granularity, direction)
    by_tile = scale is None and (rule.scale == "e8m0" or rule.granularity not in (TENSOR, ROW))
    if by_tile and not all(map(matrix_quantize.divides, cuts)):
        return None
    wanted = matrix_quantize.CastInput(x, rule, cuts, None if running is None else running.amax, scale)
    if reduce_amax is None or scale is not None or all(rows for rows, _ in cuts):
        return wanted
    return _with_other_ranks(wanted, reduce_amax)


@cache
def _cuts(granularity: Granularity, direction: Direction) -> list[tuple[int, int]]:
    """(rows, columns) of the blocks of each needed cast, in x's orientation."""
    high, wide = granularity.rows, granularity.cols
    if high == wide or direction == "rowwise":
        return [(high, wide)]
    return [(wide, high)] if direction == "columnwise" else [(high, wide), (wide, high)]


def _with_other_ranks(
    wanted: matrix_quantize.CastInput, reduce_amax: AmaxReduction
) -> matrix_quantize.CastInput:
    """The same cast with reduced amaxes, and this rank's own amax and number of NaN and Inf."""
    amaxes, special = matrix_quantize.block_amaxes(wanted.x, wanted.cuts)
    # Bits sort like the numbers, and no floating-point mode flushes them.
    bits = amaxes[0].view(torch.int32).amax()
    amax = bits.view(torch.float32)
    if wanted.running is not None:
        running = wanted.running.view(torch.int32)
        torch.maximum(running, bits, out=running)
    if wanted.rule.granularity.is_tensor:
        amaxes = [amax.clone()]
    for (rows, _), found in zip(wanted.cuts, amaxes, strict=True):
        if rows == 0:  # whole columns, of which a shard of rows holds a part
            reduce_amax(found)
    return wanted._replace(amaxes=amaxes, own=(amax, special))


def _cast_result(request: CastRequest, done: matrix_quantize.CastOutput) -> CastResult:
    """The quantized tensor made of each cut's codes and scales, both in x's orientation."""
    x, rule, direction, _, running, *_ = request
    made, amax, special = done
    nonfinite = None
    if special:
        nonfinite = torch.tensor(special, dtype=torch.int64, device="cpu")
        if running is not None:
            running.nonfinite.add_(nonfinite)
    facts = rule.granularity, rule.pow2, not special
    rowwise = columnwise = None
    if direction != "columnwise":
        rowwise = QuantizedSide(made[0].codes, made[0].scale_inv, *facts)
    if direction != "rowwise":
        codes, scale_inv = made[-1]
        turned = scale_inv if rule.granularity.is_tensor else scale_inv.t()
        columnwise = QuantizedSide(codes.t(), turned, *facts)  # [cols, rows]
    return CastResult(Float8Tensor(rowwise, columnwise, x.dtype), amax, nonfinite)

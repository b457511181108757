"""CPU casts in C, of one matrix or many in one call. What C does not take goes through reference.py.

Amaxes, scales and codes of both directions are one call (kernels/cpu/casts.c), but where ranks share amaxes: then those
are found first, reduced, and handed to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.cpu import emulation, matrix_quantize
from ..numerics.rule import ROW, TENSOR, Granularity
from ..tensor import Float8Tensor, QuantizedSide
from . import reference
from .base import AmaxReduction, CastRequest, Quantized, Region


def quantize(
    request: CastRequest, reduce_amax: AmaxReduction | None = None, region: Region | None = None
) -> Quantized:
    """``reference.quantize``, by C where it takes the matrix."""
    if not takes(request):
        return _as_specified(request, reduce_amax, region)
    wanted = _cast_input(request)
    if reduce_amax is None or request.scale is not None or all(rows for rows, _ in wanted.cuts):
        (made,) = matrix_quantize.quantize([wanted])
        return _quantized(request, made)
    wanted, amax, special = _with_other_ranks(wanted, reduce_amax)
    (made,) = matrix_quantize.quantize([wanted])
    return _quantized(request, made._replace(amax=amax, special=special))


def quantize_each(requests: Sequence[CastRequest]) -> list[Quantized]:
    """``quantize`` of each, of which no amax is reduced and none is rounded stochastically."""
    inside = [takes(one) for one in requests]
    made = iter(
        matrix_quantize.quantize(
            [_cast_input(one) for one, taken in zip(requests, inside, strict=True) if taken]
        )
    )
    found = []
    for one, taken in zip(requests, inside, strict=True):
        if taken:
            found.append(_quantized(one, next(made)))
        else:
            found.append(_as_specified(one, None, None))
    return found


def takes(request: CastRequest) -> bool:
    """Whether C casts it."""
    x, rule = request.x, request.rule
    if rule.stochastic or x.dtype not in emulation.FLOATS or not emulation.usable(x):
        return False
    if request.scale is not None or (rule.scale != "e8m0" and rule.granularity in (TENSOR, ROW)):
        return True
    return all(map(matrix_quantize.divides, _cuts(request)))


def _as_specified(
    request: CastRequest, reduce_amax: AmaxReduction | None, region: Region | None
) -> Quantized:
    x, rule, direction, scale, running = request
    return reference.quantize(
        x, rule, direction, scale=scale, reduce_amax=reduce_amax, region=region, running=running
    )


def _cuts(request: CastRequest) -> list[tuple[int, int]]:
    """Rows and columns of the blocks of each cast that is needed, as the matrix lies."""
    granularity, direction = request.rule.granularity, request.direction
    high, wide = granularity.rows, granularity.cols
    if high == wide or direction == "rowwise":
        return [(high, wide)]
    return [(wide, high)] if direction == "columnwise" else [(high, wide), (wide, high)]


def _cast_input(request: CastRequest) -> matrix_quantize.CastInput:
    running = None if request.running is None else request.running.amax
    return matrix_quantize.CastInput(request.x, request.rule, _cuts(request), running, request.scale)


def _with_other_ranks(
    wanted: matrix_quantize.CastInput, reduce_amax: AmaxReduction
) -> tuple[matrix_quantize.CastInput, torch.Tensor, int]:
    """The same with amaxes that were found and reduced; this rank's own amax, and how many elements are NaN or Inf."""
    amaxes, special = matrix_quantize.block_amaxes(wanted.x, wanted.cuts)
    bits = amaxes[0].view(torch.int32).amax()  # which sort like the numbers, and no mode flushes them
    amax = bits.view(torch.float32)
    if wanted.running is not None:
        running = wanted.running.view(torch.int32)
        torch.maximum(running, bits, out=running)
    if wanted.rule.granularity.is_tensor:
        amaxes = [amax.clone()]
    for (rows, _), found in zip(wanted.cuts, amaxes, strict=True):
        if rows == 0:  # whole columns, of which a shard of rows holds a part
            reduce_amax(found)
    return wanted._replace(amaxes=amaxes, finite=not special), amax, special


def _quantized(request: CastRequest, done: matrix_quantize.CastOutput) -> Quantized:
    """What codes and scales of each cut are the sides of; both lie as x does."""
    x, rule, direction, _, running = request
    made, amax, special = done
    nonfinite = None
    if special:
        nonfinite = torch.tensor(special, dtype=torch.int64, device="cpu")
        if running is not None:
            running.nonfinite.add_(nonfinite)
    facts = rule.granularity, rule.scale != "fp32", not special
    sides = direction != "columnwise", direction != "rowwise"
    return Quantized(_tensor(made, *sides, facts, x.dtype), amax, nonfinite)


def _tensor(
    made: Sequence[matrix_quantize.CodesAndScale],
    row: bool,
    column: bool,
    facts: tuple[Granularity, bool, bool],
    dtype: torch.dtype,
) -> Float8Tensor:
    """What was made of each cut as the sides that are requested; facts: of both (tensor.QuantizedSide)."""
    rowwise = QuantizedSide(made[0].codes, made[0].scale_inv, *facts) if row else None
    if not column:
        return Float8Tensor(rowwise, None, dtype)
    codes, scale_inv = made[-1]
    turned = scale_inv if facts[0].is_tensor else scale_inv.t()
    return Float8Tensor(rowwise, QuantizedSide(codes.t(), turned, *facts), dtype)  # [cols, rows]

"""Statistics of FP8 parameters: master values with their codes.

Statistics need the values that the codes were cast from. The parameter does not have them; the optimizer
does, in float32. If the optimizer is sharded, each rank measures its own flat range, and the ranges add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from ..numerics.rule import Granularity
from ..params.fp8_parameter import Fp8Parameter
from ..tensor import Float8Tensor, QuantizedSide


class HeldWeights(NamedTuple):
    """This rank's data of an FP8 parameter.

    Attributes:
        values: in the weight's nominal dtype: [rows, cols], or [1, n] for a flat range.
        codes: quantised values; None if their source values are unknown.
        whole: every rank with the weight has all of it, so only one counts.
    """

    values: torch.Tensor
    codes: Float8Tensor | None
    whole: bool


def held(weight: Fp8Parameter, *, columnwise: bool) -> HeldWeights:
    """This rank's values and codes; empty values if other ranks own them.

    ``columnwise``: include columnwise codes of a flat range.

    Without a master (weights gathered as codes by FSDP) the values are the dequantised codes.
    """
    if weight.piece is None or weight.piece[1] - weight.piece[0] == weight.numel():
        master = weight.master
        if master is None:
            return HeldWeights(weight.dequantize(), None, True)
        return HeldWeights(
            master.detach().to(weight.dtype).view(weight.shape), weight.quantized, weight.piece is None
        )
    start, stop = weight.piece
    master = weight.master
    if start == stop or master is None:
        return HeldWeights(torch.empty(1, 0, dtype=weight.dtype, device=weight.device), None, False)
    row, column = weight.quantized.sides
    assert row is not None and column is not None
    rowwise = _piece(row, start, stop, by_column=False)
    turned = _columnwise(_piece(column, start, stop, by_column=True)) if columnwise else None
    values = master.detach().to(weight.dtype).view(1, -1)
    return HeldWeights(values, Float8Tensor(rowwise, turned, weight.dtype), False)


def _piece(side: QuantizedSide, start: int, stop: int, *, by_column: bool) -> QuantizedSide:
    """A flat range of the weight's elements as one row, with a scale per element, or one for all."""
    codes = side.codes.t() if by_column else side.codes
    codes = codes.reshape(1, -1)[:, start:stop]
    if side.granularity.is_tensor:
        return replace(side, codes=codes)
    scale = side.expanded_scale_inv().expand(side.codes.shape)
    scale = (scale.t() if by_column else scale).reshape(1, -1)[:, start:stop]
    return QuantizedSide(codes, scale, Granularity(1, 1), side.pow2, side.finite)


def _columnwise(side: QuantizedSide) -> QuantizedSide:
    """The same elements as a columnwise side: [n, 1]."""
    scale = side.scale_inv if side.granularity.is_tensor else side.scale_inv.t()
    return replace(side, codes=side.codes.t(), scale_inv=scale)

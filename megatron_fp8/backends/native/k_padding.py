"""Zero padding of codes along a product's contraction dimension.

torch's scaled products sum over whole 16s, 32s or 128s. What wgrad sums over are tokens, of which an expert has any
number. So the casts of a linear's operands write zeros behind the last token of columnwise codes (``whole``), which costs
no launch and no copy; scales are as they were, since a block that is not whole has one already. The product takes such
codes as they lie, sums over zeros too, and knows nothing of it.

Codes that were made otherwise (gathered ones, those that compiled code saves, rounded at random) end with the matrix.
Beside codes that reach further they are copied among zeros (``of_one_length``); two such, as the product needs
(layout.place_codes).
"""

from __future__ import annotations

from dataclasses import replace

from ...numerics.rule import Granularity
from ...tensor import QuantizedSide
from .layout import place_codes


def whole(granularity: Granularity) -> int:
    """What the length of codes is made a multiple of: a block, or 16 where scales are none of the contraction's."""
    return max(granularity.cols, 16)


def of_one_length(a: QuantizedSide, b: QuantizedSide) -> tuple[QuantizedSide, QuantizedSide]:
    """Both operands of a product, their codes equally long; they themselves if they are, or are of other matrices."""
    first, second = a.codes.shape[1], b.codes.shape[1]
    if first == second or a.shape[1] != b.shape[1]:
        return a, b
    return _reaching(a, max(first, second)), _reaching(b, max(first, second))


def _reaching(side: QuantizedSide, length: int) -> QuantizedSide:
    rows, now = side.codes.shape
    if now == length:
        return side
    return replace(side, codes=place_codes(side.codes, rows, length), padding=length - side.shape[1])

"""Cached calls of torch's scaled product for operands in its layout.

So lie all that a linear's casts make in sizes that need no padding. What it takes to see that, and to describe both sides
to ``plan``, is more than the product takes the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from ...numerics.formats import E5M2
from ...numerics.rule import BLOCK_128X128
from ...tensor import QuantizedSide
from ..base import RESULTS
from .layout import Argument, Mode, Operand, ProductPlan, Refusal, plan, square_scales

Facts = tuple[Any, ...]
Place = Callable[[torch.Tensor], torch.Tensor]
"""Makes an argument of scale_inv."""
Product = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]
"""Of a's codes and scale_inv, b's, and the bias."""


def direct(
    a: QuantizedSide,
    b: QuantizedSide,
    out: torch.dtype,
    bias: torch.Tensor | None,
    fast: bool,
    refusal: Refusal,
) -> Product | None:
    """What gives a @ b^T + bias, of these and of all that lie so; None where something is to be placed, padded, done
    to the result, or refused. Arguments as backend.gemm's."""
    return _direct(
        facts_of(a), facts_of(b), out, None if bias is None else (bias.shape, bias.dtype), fast, refusal
    )


def facts_of(side: QuantizedSide) -> Facts:
    """What a product asks of a side."""
    codes, scale = side.codes, side.scale_inv
    lies = (codes.shape, codes.stride(), codes.dtype, scale.shape, scale.stride(), scale.dtype)
    return (*lies, side.padding, side.pow2, side.tiled, side.granularity)


@lru_cache(maxsize=4096)
def _direct(
    first: Facts, second: Facts, out: torch.dtype, bias: Facts | None, fast: bool, refusal: Refusal
) -> Product | None:
    a, b = _Side(first), _Side(second)
    (m, k), n = a.codes, b.codes[0]
    fits = (k, a.padding) == (b.codes[1], b.padding) and out in RESULTS and (bias is None or bias[0] == (n,))
    if (
        not fits
        or 0 in (m, n, k)
        or not (a.ready and b.ready)
        or a.operand.dtype == b.operand.dtype == E5M2.dtype
    ):
        return None
    made = plan(a.operand, b.operand, out, None if bias is None else bias[1], fast, refusal)
    left = made.post_scale or made.post_bias or made.request.out != out or made.request.triton
    if left or (made.a.shape, made.b.shape) != ((m, k), (k, n)):
        return None
    scale_a, scale_b = a.placed(made, made.scale_a, first=True), b.placed(made, made.scale_b, first=False)
    if scale_a is None or scale_b is None:
        return None
    return _call(made, scale_a, scale_b)


def _call(made: ProductPlan, scale_a: Place, scale_b: Place) -> Product:
    recipes, out, fast = made.request.mode.recipes, made.request.out, made.fast

    def product(
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return torch._scaled_mm(a, b.t(), scale_a(a_scale), scale_b(b_scale), bias, None, out, fast)

    if recipes is None or made.request.by == "torch v1":
        return product
    if not hasattr(torch, "_scaled_mm_v2"):
        raise RuntimeError("this torch has no _scaled_mm_v2, which block scales need: 2.10 and newer have")
    kind_a, kind_b = [recipes[0]], [recipes[1]]

    def product_v2(
        a: torch.Tensor,
        a_scale: torch.Tensor,
        b: torch.Tensor,
        b_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        first, second = [scale_a(a_scale)], [scale_b(b_scale)]
        return torch._scaled_mm_v2(a, b.t(), first, kind_a, [], second, kind_b, [], bias, out, [], fast)

    return product_v2


class _Side:
    """One of the two, by its facts."""

    def __init__(self, facts: Facts):
        self.codes, stride, dtype, self.scale, self.scale_stride, kind, *others = facts
        self.padding, pow2, self.tiled, granularity = others
        self.ready = stride == (self.codes[1], 1)
        self.operand = Operand(
            self.codes[0], self.codes[1], dtype, granularity, kind == torch.float8_e8m0fnu, pow2
        )

    def placed(self, made: ProductPlan, argument: Argument, *, first: bool) -> Place | None:
        """What makes the argument of a side's scales; None: they have to be copied."""
        mode, cut = made.request.mode, self.operand.granularity
        if mode is Mode.MX:
            return _as_it_is if self.tiled else None
        if mode is Mode.TENSOR:
            return _as_it_is  # one number, in whatever shape
        if mode is Mode.ROW:
            if (self.scale, self.scale_stride) != ((self.codes[0], 1), (1, 1)):
                return None
            return _as_it_is if first else _across
        if not first and mode is Mode.BLOCK and cut == BLOCK_128X128:
            return partial(square_scales, argument)
        wanted = argument.shape, argument.stride
        if cut.rows != 1:
            return None
        if (self.scale, self.scale_stride) == wanted:
            return _as_it_is
        return _turned if (self.scale[::-1], self.scale_stride[::-1]) == wanted else None


def _as_it_is(scale: torch.Tensor) -> torch.Tensor:
    return scale


def _turned(scale: torch.Tensor) -> torch.Tensor:
    return scale.t()


def _across(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(1, -1)

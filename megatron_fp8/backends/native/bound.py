"""The casts of one slot that come again: bound to the shape of what they cast (kernels/bound.py).

A shape is bound when it comes a second time, so that what never comes again costs nothing more; of experts, whose tokens
vary, there may be many, so the table is emptied when it is full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...numerics.rule import Direction, Rule
from ...tensor import Float8Tensor, QuantizedSide
from ..base import Running
from .backend import quantize

_MOST = 64
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class _Bound(NamedTuple):
    """A BoundCast, and what its sides are besides codes and scales: granularity, pow2, finite, tiled."""

    cast: Any
    facts: tuple[Any, ...]


class BoundCasts:
    """``backend.quantize`` by one rule into one slot, for matrices that no group shares.

    Args:
        rule: one that kernels cast by.
    """

    def __init__(self, rule: Rule):
        self._rule = rule
        self._bound: dict[tuple[Any, ...], _Bound | None] = {}

    def __call__(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        scale: torch.Tensor | None,
        running: Running | None,
        for_product: bool,
    ) -> Float8Tensor:
        """x quantised; arguments as backend.quantize's. ``scale`` and ``running`` lie where they lay in
        earlier calls: once the arena has moved, others are made."""
        arguments: dict[str, Any] = {"scale": scale, "running": running, "for_product": for_product}
        # Of others the values are computed as they are read, or are not what lies in memory.
        if type(x) not in _PLAIN or x.is_neg() or x._is_zerotensor():
            return quantize(x, self._rule, direction, **arguments).tensor
        lies = (x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.get_device())
        key = (*lies, direction, for_product, scale is None, running is None)
        if (bound := self._bound.get(key)) is not None:
            row, column = bound.cast(x)
            return Float8Tensor(
                row and QuantizedSide(*row, *bound.facts),
                column and QuantizedSide(*column, *bound.facts),
                x.dtype,
            )
        if key not in self._bound:
            if len(self._bound) >= _MOST:
                self._bound.clear()
            self._bound[key] = None
            return quantize(x, self._rule, direction, **arguments).tensor
        from ...kernels.bound import Tape  # loads Triton

        stays = [scale] if running is None else [scale, running.amax, running.bits, running.nonfinite]
        tape = Tape(x, tuple(tensor for tensor in stays if tensor is not None))
        done = quantize(x, self._rule, direction, **arguments, by=tape.launch).tensor
        cast = tape.bound(*(None if side is None else (side.codes, side.scale_inv) for side in done.sides))
        if cast is not None:
            side = next(side for side in done.sides if side is not None)
            self._bound[key] = _Bound(cast, (side.granularity, side.pow2, side.finite, side.tiled))
        return done

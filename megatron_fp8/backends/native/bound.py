"""Cached plans for repeated casts of one slot, by shape (kernels/bound.py).

A shape is bound when it comes a second time, so that what never comes again costs nothing more; of experts, whose tokens
vary, there may be many, so the table is emptied when it is full.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...numerics.rule import Direction, Granularity, Rule
from ...tensor import Float8Tensor, QuantizedSide
from ..base import Running
from .backend import quantize

_MOST = 64
_PLAIN = {torch.Tensor, torch.nn.Parameter}


class Bound(NamedTuple):
    """A cast that comes again.

    Attributes:
        cast: a BoundCast.
        row, column: whether it makes that side.
        facts: what sides are besides codes and scales: granularity, pow2, finite, tiled.
        padding: the column side's.
    """

    cast: Any
    row: bool
    column: bool
    facts: tuple[Granularity, bool, bool, bool]
    padding: int

    def tensor(self, made: list[torch.Tensor], dtype: torch.dtype) -> Float8Tensor:
        """What ``cast`` made of a matrix of that dtype."""
        row = QuantizedSide(made[0], made[1], *self.facts) if self.row else None
        column = QuantizedSide(made[-2], made[-1], *self.facts, self.padding) if self.column else None
        return Float8Tensor(row, column, dtype)


class BoundCasts:
    """``backend.quantize`` by one rule into one slot, for matrices that no group shares.

    Args:
        rule: one that kernels cast by.
    """

    def __init__(self, rule: Rule):
        self._rule = rule
        self._bound: dict[tuple[Any, ...], Bound | None] = {}

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
        if not lies_plainly(x):
            return quantize(x, self._rule, direction, **arguments).tensor
        key = _key(x, direction, scale, running, for_product)
        if (bound := self._bound.get(key)) is not None:
            if (stream := bound.cast.ready()) is None:
                return quantize(x, self._rule, direction, **arguments).tensor
            return bound.tensor(bound.cast(x.data_ptr(), stream), x.dtype)
        if key not in self._bound:
            if len(self._bound) >= _MOST:
                self._bound.clear()
            self._bound[key] = None
            return quantize(x, self._rule, direction, **arguments).tensor
        from ...kernels.bound import Tape  # loads Triton

        stays = [scale] if running is None else [scale, running.amax, running.bits, running.nonfinite]
        tape = Tape(x, tuple(tensor for tensor in stays if tensor is not None))
        done = quantize(x, self._rule, direction, **arguments, by=tape.launch).tensor
        row, column = done.sides
        cast = tape.bound(*(None if side is None else (side.codes, side.scale_inv) for side in done.sides))
        side = column if row is None else row
        if cast is not None and side is not None:
            facts = side.granularity, side.pow2, side.finite, side.tiled
            padding = 0 if column is None else column.padding
            self._bound[key] = Bound(cast, row is not None, column is not None, facts, padding)
        return done

    def bound(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        scale: torch.Tensor | None,
        running: Running | None,
        for_product: bool,
    ) -> Bound | None:
        """What casts of matrices that lie as x are bound to, if they are."""
        if not lies_plainly(x):
            return None
        return self._bound.get(_key(x, direction, scale, running, for_product))


def lies_plainly(x: torch.Tensor) -> bool:
    """Whether x is what lies in its memory, and nothing is to be computed as it is read."""
    return type(x) in _PLAIN and not x.is_neg() and not x._is_zerotensor()


def _key(
    x: torch.Tensor, direction: str, scale: object, running: object, for_product: bool
) -> tuple[Any, ...]:
    lies = (x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.get_device())
    return *lies, direction, for_product, scale is None, running is None

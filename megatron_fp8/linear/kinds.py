"""Keys of cached execution plans: kinds of calls of a linear (bound.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..backends.native.bound import lies_plainly

if TYPE_CHECKING:
    from .bound import BoundBackward, BoundForward

_MOST = 64
"""Kinds of one site; of experts, whose tokens vary, there may be many, so the table is emptied when it is full."""
_TRIES = 16
"""So often a kind is noted before it is left to the ordinary way for good: meanwhile casts are bound, slots find their
place and scales come."""


class Kind:
    """Calls that are alike.

    Attributes:
        bound: what they are bound to: a BoundForward or a BoundBackward; None: nothing yet.
    """

    def __init__(self) -> None:
        self.bound: Any = None
        self._met = 0

    def to_be_noted(self) -> bool:
        """Whether this call, one of the kind that goes the ordinary way, is to be noted."""
        if self.bound is not None and self.bound.still():
            return False  # it only cannot run from here
        self._met += 1
        return 1 < self._met <= _TRIES + 1

    def bind(self, bound: BoundForward | BoundBackward | None) -> None:
        """To what notes gave, if they gave anything; when that holds no longer, calls are noted again."""
        self.bound = bound
        if bound is not None:
            self._met = 1


class Kinds:
    """The kinds of calls that were met."""

    def __init__(self) -> None:
        self._met: dict[tuple[Any, ...], Kind] = {}

    def of(self, key: tuple[Any, ...]) -> Kind:
        """That of the calls with this key."""
        kind = self._met.get(key)
        if kind is None:
            if len(self._met) >= _MOST:
                self._met.clear()
            kind = self._met[key] = Kind()
        return kind

    def of_forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, record: bool
    ) -> Kind | None:
        """That of a forward in training; None of tensors that have to be computed as they are read."""
        if not (lies_plainly(x) and lies_plainly(weight)):
            return None
        return self.of(
            (
                x.shape,
                x.stride(),
                x.dtype,
                x.data_ptr() % 16,
                x.get_device(),
                x.requires_grad,
                weight.shape,
                weight.stride(),
                weight.dtype,
                weight.data_ptr() % 16,
                weight.get_device(),
                weight.requires_grad,
                bias if bias is None else (bias.shape, bias.dtype, bias.stride(), bias.requires_grad),
                record,
            )
        )

    def of_backward(
        self, dy: torch.Tensor, saved: Iterable[torch.Tensor], needs: tuple[bool, ...], adds: bool
    ) -> Kind | None:
        """That of a backward. ``adds``: the weight has a main_grad."""
        if not lies_plainly(dy):
            return None
        lies = [(t.shape, t.stride(), t.dtype, t.get_device()) for t in saved]
        key = dy.shape, dy.stride(), dy.dtype, dy.data_ptr() % 16, dy.get_device(), needs, adds
        return self.of((*key, *lies))

"""The observer interface: casts, products, ends of iterations.

Telemetry and diagnosis implement it; the linear knows neither. ``Fp8State.watch`` sets an observer. Without one, and
in iterations that it does not want, casts and products only check for it, and no operation runs. Rejected: hooks on
modules. They see a layer's input before it is gathered and its output after it is reduced, and no codes, no scale and
none of the three products.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..backends.base import CastResult
from ..numerics.rule import Direction
from ..tensor import Operand


class CastEvent(NamedTuple):
    """x [rows, cols] was quantized for a slot.

    Attributes:
        slot: SITE.ROLE, or SITE.ROLE.GEMM where one role is cast twice.
        recorded: False for casts that no iteration counts: in evaluation, in a recomputation, and a second cast of
            the same tensor for another GEMM.
        shard: x is this rank's part of the tokens that its tensor-parallel group gathers.
    """

    slot: str
    x: torch.Tensor
    done: CastResult
    direction: Direction
    recorded: bool
    shard: bool


class ProductEvent(NamedTuple):
    """y [M, N] = a [M, K] @ b [N, K]^T was computed as 'fprop', 'dgrad' or 'wgrad' of a site, before any sum over
    ranks. ``recorded`` as CastEvent's."""

    site: str
    gemm: str
    a: Operand
    b: Operand
    y: torch.Tensor
    recorded: bool


class LinearEvent(NamedTuple):
    """A whole site ran in high precision, in training: y [..., N] = x [..., K] @ weight^T. Its backward is autograd's
    and not observed. ``recorded`` and ``shard`` as CastEvent's."""

    site: str
    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    recorded: bool
    shard: bool


class Observer(Protocol):
    """Receives each cast and product of a model, in order. It may keep the tensors but must not change them, and runs
    inside forward and backward, where it must not communicate."""

    def wants(self, iteration: int) -> bool:
        """Whether it observes the iteration of this number (from 0). Called when the iteration begins."""

    def cast(self, seen: CastEvent) -> None:
        """A tensor was quantized."""

    def stored(self, slot: str, weight: torch.Tensor) -> None:
        """An FP8 weight (an Fp8Parameter) is used without a cast, for the first time in this iteration's training."""

    def product(self, seen: ProductEvent) -> None:
        """A GEMM ran."""

    def high_precision(self, seen: LinearEvent) -> None:
        """A linear in high precision ran."""

    def ended(self, iteration: int) -> None:
        """The iteration has ended, observed or not, and its amaxes are reduced. All ranks call it: it may
        communicate."""

"""The observer interface: casts, products, ends of iterations.

Telemetry and diagnosis look on; the linear knows neither. ``Fp8State.watch`` puts an observer in place. Without one, and
in iterations that it does not want, a cast and a product ask only whether it is there, and no operation runs.
Rejected: hooks on modules. They see a layer's input before it is gathered and its output after it is reduced, and no
code, no scale and none of the three products.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from ..backends.base import Quantized
from ..numerics.rule import Direction
from ..tensor import Operand


class SeenCast(NamedTuple):
    """x [rows, cols] was quantised for a slot.

    Attributes:
        slot: named SITE.ROLE, or SITE.ROLE.GEMM where one role is cast twice.
        recorded: False of what counts for no iteration: of forwards in evaluation and in a recomputation, and of a cast
            of what was cast before for another GEMM.
        shard: x is this rank's tokens of a matrix that its tensor-parallel group gathers.
    """

    slot: str
    x: torch.Tensor
    done: Quantized
    direction: Direction
    recorded: bool
    shard: bool


class SeenProduct(NamedTuple):
    """y [M, N] = a [M, K] @ b [N, K]^T was computed as 'fprop', 'dgrad' or 'wgrad' of a site, on this rank alone: sums
    over ranks come later. ``recorded`` as SeenCast's."""

    site: str
    gemm: str
    a: Operand
    b: Operand
    y: torch.Tensor
    recorded: bool


class SeenLinear(NamedTuple):
    """A whole site ran in high precision, in training: y [..., N] = x [..., K] @ weight^T. Of its backward nothing is
    told: what y's gradient becomes is autograd's. ``recorded`` and ``shard`` as SeenCast's."""

    site: str
    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    recorded: bool
    shard: bool


class Observer(Protocol):
    """Told of each cast and product of a model, in the order in which they happen. It may keep what it is given for as
    long as it likes, must change none of it, and runs inside forward and backward: it must not communicate there."""

    def wants(self, iteration: int) -> bool:
        """Whether it is told what passes in the iteration of this number (from 0). Asked when it begins."""

    def cast(self, seen: SeenCast) -> None:
        """A tensor was quantised."""

    def stored(self, slot: str, weight: torch.Tensor) -> None:
        """A weight that lives as FP8 (an Fp8Parameter) is used as it is, for the first time in this iteration's training:
        nothing is cast."""

    def product(self, seen: SeenProduct) -> None:
        """A GEMM ran."""

    def high_precision(self, seen: SeenLinear) -> None:
        """A linear in high precision ran."""

    def ended(self, iteration: int) -> None:
        """The state's iteration of this number has ended, wanted or not, its amaxes are settled. All ranks are here: the
        one place to communicate."""

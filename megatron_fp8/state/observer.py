"""The one seam for whoever watches FP8 at work: what was cast, and what was multiplied.

Telemetry and diagnosis look on; the linear knows neither. ``Fp8State.watch`` puts an observer in place; without one a
cast and a product ask only whether it is there, and no operation runs.
Rejected: hooks on modules. They see a layer's input before it is gathered and its output after it is reduced, and no
code, no scale and none of the three products.
"""

from __future__ import annotations

from typing import Protocol

import torch

from ..backends.base import Direction, Quantized
from ..tensor import Operand


class Observer(Protocol):
    """Told of each cast and product of a model, in the order in which they happen. It may keep what it is given for as
    long as it likes, must change none of it, and runs inside forward and backward: it must not communicate there."""

    def cast(
        self, slot: str, x: torch.Tensor, done: Quantized, direction: Direction, *, recorded: bool
    ) -> None:
        """x [rows, cols] was quantised for a slot, named SITE.ROLE, or SITE.ROLE.GEMM where one role is cast twice.

        ``recorded`` is False in evaluation, in a recomputation, and where x was quantised before for another GEMM.
        """

    def product(self, site: str, gemm: str, a: Operand, b: Operand, y: torch.Tensor) -> None:
        """y [M, N] = a [M, K] @ b [N, K]^T was computed as 'fprop', 'dgrad' or 'wgrad' of a site, on this rank alone:
        sums over ranks come later."""

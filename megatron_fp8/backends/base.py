"""The interface of a backend: requests, quantized matrices, checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..numerics.cast import RandomKey, check_float
from ..numerics.rule import Direction, Rule
from ..tensor import Float8Tensor, QuantizedSide

AmaxReduction = Callable[[torch.Tensor], None]
"""Reduces a float32 tensor over ranks by MAX, in place."""


@dataclass(frozen=True)
class Region:
    """Position of a matrix in the logical one that all ranks share; it chooses the bits of stochastic rounding."""

    key: RandomKey
    row_offset: int = 0
    col_offset: int = 0
    total_cols: int = 0

    def index(self, rows: int, cols: int, device: torch.device) -> torch.Tensor:
        """int64 [rows, cols]: row-major indices in the logical matrix."""
        row = torch.arange(self.row_offset, self.row_offset + rows, device=device, dtype=torch.int64)
        col = torch.arange(self.col_offset, self.col_offset + cols, device=device, dtype=torch.int64)
        return row[:, None] * (self.total_cols or cols) + col


@dataclass(frozen=True)
class RunningAmax:
    """An arena's numbers for a slot in the current iteration.

    Attributes:
        amax: float32 [], the largest.
        bits: int32 [], the same memory: bits sort like the numbers, in any floating-point mode of the thread.
        nonfinite: float32 [], the count.
    """

    amax: torch.Tensor
    bits: torch.Tensor
    nonfinite: torch.Tensor

    def record(self, amax: torch.Tensor, nonfinite: torch.Tensor | None) -> None:
        """Updates the largest by amax (float32 [], may be Inf, never NaN); adds the non-finite count, if any."""
        torch.maximum(self.bits, amax.view(torch.int32), out=self.bits)
        if nonfinite is not None:
            self.nonfinite.add_(nonfinite)


class CastRequest(NamedTuple):
    """A cast: arguments of a backend's ``quantize``.

    Attributes:
        x: [rows, cols], float32, bfloat16 or float16; any strides; may be empty. NaN becomes 0x7F, Inf saturates; both
            are counted, and neither makes a scale non-finite.
        rule: format, granularity, scale kind.
        scale: float32 [], delayed or static; of NVFP4 the static amax of the tensor, from which its second scale follows.
            None computes it from x.
        running: also receives amax and non-finite count.
        reduce_amax: if x is a shard of a matrix's rows: reduces amaxes over ranks, the tensor's and those of whole
            columns (the columnwise side of per-row scales). NVFP4: the tensor's, float32 [1], or [2] of both directions.
        region: position and random stream for stochastic rounding, needed if rule.stochastic.
        for_product: only the backend's gemm reads the sides. For backends with ``kernels_cast``.
    """

    x: torch.Tensor
    rule: Rule
    direction: Direction
    scale: torch.Tensor | None = None
    running: RunningAmax | None = None
    reduce_amax: AmaxReduction | None = None
    region: Region | None = None
    for_product: bool = False


@dataclass(frozen=True)
class CastResult:
    """Result of a cast: the tensor, its local amax (float32 []) and its count of NaN and Inf.

    A backend that recorded in a ``RunningAmax`` may return the slot's amax and count."""

    tensor: Float8Tensor
    amax: torch.Tensor
    nonfinite: torch.Tensor | None


def check_matrix(x: torch.Tensor, direction: str) -> None:
    """Raises ValueError unless x is a matrix of a supported floating dtype and the direction is known."""
    check_float(x)
    if x.ndim != 2:
        raise ValueError(
            f"quantize needs a matrix [rows, cols], got shape {tuple(x.shape)}: flatten it first"
        )
    if direction not in ("rowwise", "columnwise", "both"):
        raise ValueError(f"direction {direction!r} is unknown: use 'rowwise', 'columnwise' or 'both'")


RESULTS = (torch.float32, torch.bfloat16, torch.float16)
"""Result dtypes of a gemm (and float64, for a reference)."""


def gemm_error(
    a: QuantizedSide, b: QuantizedSide, out_dtype: torch.dtype, bias: torch.Tensor | None
) -> ValueError:
    """A gemm's error: contractions differ, both operands are E5M2, or the result dtype or the bias's shape is wrong."""
    if a.shape[1] != b.shape[1]:
        return ValueError(
            f"gemm contracts the last dimensions, {tuple(a.shape)} and {tuple(b.shape)}: they must be equal"
        )
    if out_dtype not in RESULTS:
        return ValueError(f"gemm: out_dtype {out_dtype} is none of {', '.join(map(str, RESULTS))}")
    if bias is not None and tuple(bias.shape) != (b.codes.shape[0],):
        return ValueError(
            f"gemm: a bias of shape {tuple(bias.shape)}, where ({b.codes.shape[0]},) is needed: one for each row of b"
        )
    return ValueError("gemm: E5M2 x E5M2 is refused, no FP8 hardware multiplies it; make one operand E4M3")


def gemm_in_turn(
    gemm: Callable[..., torch.Tensor],
    a: Sequence[QuantizedSide],
    b: Sequence[QuantizedSide],
    outs: Sequence[torch.Tensor],
    *,
    add: bool = False,
    fast_accumulation: bool = False,
) -> None:
    """outs[i] [M, N] = gemm of a[i] [M, K] and b[i] [N, K], one by one: a ``grouped_gemm`` for any backend.

    Args:
        gemm: a backend's.
        outs: of a result dtype. M and K may be 0; with K = 0 the product is 0.
        add: add the float32 product to outs, of any dtype, rounded once as by ``out.add_``. With K = 0 nothing changes.
        fast_accumulation: as gemm's.
    """
    for left, right, out in zip(a, b, outs, strict=True):
        if out.numel() == 0 or (add and left.codes.shape[1] == 0):
            continue
        wanted = torch.float32 if add else out.dtype
        product = gemm(left, right, out_dtype=wanted, fast_accumulation=fast_accumulation)
        out.add_(product) if add else out.copy_(product)

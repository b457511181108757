"""Codes, amaxes and scales on any device, in C or in torch.

This module chooses between C and torch for elementwise operations. Callers choose for larger C calls (a whole cast, a
GEMM, a layer's experts, statistics); docs/architecture.md lists them. C and torch give the same bytes; tests compare
both with numerics/ on every path.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..numerics import cast as reference
from ..numerics import scaling
from ..numerics.formats import FloatFormat
from .cpu import emulation, matrix_quantize


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """x [...], detached, with its values materialised in memory for kernels.

    torch stores some negations (``z.conj().imag``) and zeros (``torch._efficientzerotensor``) as a flag of the tensor.
    """
    x = x.detach().resolve_neg()
    return torch.zeros_like(x) if x._is_zerotensor() else x


def cast(
    x: torch.Tensor, scale: torch.Tensor | None, fmt: FloatFormat, *, bounded: bool = False
) -> torch.Tensor:
    """Codes of ``x * scale``: arguments, result and errors as in ``numerics.cast.cast``."""
    if (scale is None or scale.numel() == 1) and x.dtype in emulation.FLOATS and emulation.usable(x):
        return emulation.cast(x, scale, (0, 0), fmt.dtype)
    return reference.cast(x, scale, fmt, bounded=bounded)


def cast_blocks(
    x: torch.Tensor, scale: torch.Tensor, rows: int, cols: int, fmt: FloatFormat, *, bounded: bool = False
) -> torch.Tensor:
    """Codes [M, N] of x [M, N], one scale per block of rows x cols (0: the whole extent of that dimension).

    Args:
        scale: float32 [ceil(M / rows), ceil(N / cols)], finite and positive.
        bounded: as in ``cast``.
    """
    if x.dtype in emulation.FLOATS and emulation.usable(x):
        return emulation.cast(x, scale, (rows, cols), fmt.dtype)
    blocks = scaling.view_blocks(x, rows, cols)
    codes = reference.cast(blocks, scale[:, None, :, None], fmt, bounded=bounded)
    padded = (blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    codes = codes.view(padded)[: x.shape[0], : x.shape[1]]  # [M, N] of the padded matrix
    # Copies even where only rows are cut: a view would keep the padding in memory.
    return codes if padded == tuple(x.shape) else codes.clone(memory_format=torch.contiguous_format)


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32, *, finite: bool = False) -> torch.Tensor:
    """Values of codes [...] in dtype: as ``numerics.cast.decode``."""
    if codes.ndim == 2 and not codes.is_contiguous() and codes.t().is_contiguous():
        return decode(codes.t(), dtype, finite=finite).t()
    if emulation.usable(codes):
        wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return emulation.decode(codes, None, (0, 0), wide).to(dtype)
    return reference.decode(codes, dtype, finite=finite)


def decode_blocks(
    codes: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor | None:
    """codes [M, N] times their block's scale (float32 or E8M0), rounded once to dtype; None where C does not support it.

    scale_inv: [ceil(M / block rows), ceil(N / block cols)].
    """
    if dtype not in (torch.bfloat16, torch.float32) or not emulation.usable(codes):
        return None
    scale = scale_inv if scale_inv.dtype == torch.float32 else e8m0_to_scale_inv(scale_inv.view(torch.uint8))
    return emulation.decode(codes, scale, block, dtype)


def block_amaxes(
    x: torch.Tensor, blocks: Sequence[tuple[int, int]]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Amaxes of x [M, N] per block, and the count of NaN and Inf: as ``numerics.scaling.block_amaxes``."""
    if x.numel() and x.dtype in emulation.FLOATS and emulation.usable(x):
        amaxes, total = matrix_quantize.block_amaxes(x, blocks)
        return amaxes, torch.tensor(total, dtype=torch.int64, device="cpu") if total else None
    return scaling.block_amaxes(x, blocks)


def compute_e8m0(amax: torch.Tensor, fmt: FloatFormat) -> torch.Tensor:
    """MX block scales: as ``numerics.scaling.compute_e8m0``."""
    if emulation.usable(amax):
        return matrix_quantize.e8m0_of_amax(amax, fmt.max_exponent)
    return scaling.compute_e8m0(amax, fmt)


def e8m0_to_scale_inv(e8m0: torch.Tensor) -> torch.Tensor:
    """float32 2^(e8m0 - 127): as ``numerics.scaling.e8m0_to_scale_inv``."""
    if emulation.usable(e8m0):
        return matrix_quantize.power_of_e8m0(e8m0, False)
    return scaling.e8m0_to_scale_inv(e8m0)


def e8m0_to_scale(e8m0: torch.Tensor) -> torch.Tensor:
    """float32 2^(127 - e8m0): as ``numerics.scaling.e8m0_to_scale``."""
    if emulation.usable(e8m0):
        return matrix_quantize.power_of_e8m0(e8m0, True)
    return scaling.e8m0_to_scale(e8m0)

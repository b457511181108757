"""Products of few rows by FP8 codes in C (skinny_gemm.c), as in decoding. Codes are read once.

A CPU reads weights from memory for every token, so one byte per value in place of BF16's two halves this traffic. Codes
become bfloat16 in registers or, without instructions for it, float32 in the first cache. Sums are float32, in the order
of the same processor's products with many rows.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from . import emulation
from .emulation import MIN_PRODUCT, NAMES, address, is_plain, load_kernels, thread_count

MOST = 16
"""Maximum number of rows: those of one AMX tile."""
_TO_BFLOAT16 = {torch.float32: 0, torch.bfloat16: 1}


class Product(ctypes.Structure):
    """skinny_gemm.c's."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "exponents", "scale_a", "scale_b", "bias", "to")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "block_rows", "block_cols")),
        *((name, ctypes.c_int32) for name in ("each_a", "each_b", "e5m2", "finite", "to_bfloat16")),
    )


@cache
def inner_loops() -> tuple[int, ...]:
    """The emulation.inner_loops that this file has too; bfloat16's need VBMI and GFNI."""
    found = load_kernels().has_few_rows() if emulation.inner_loops() else 0
    return tuple(loop for loop in emulation.inner_loops() if found & loop)


def takes(rows: int, codes: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether this kernel takes a product of this many rows by codes [N, K], rounded to dtype: few rows, and not small.

    Only shapes and dtypes decide, so training and inference agree.
    """
    return (
        0 < rows <= MOST
        and codes.numel() > 0
        and codes.numel() + rows * codes.shape[1] >= MIN_PRODUCT
        and dtype in _TO_BFLOAT16
        and is_plain(codes)
        and emulation.inner_loop() in inner_loops()
    )


def matmul(
    a: torch.Tensor,
    codes: torch.Tensor,
    *,
    exponents: torch.Tensor | None = None,
    block: tuple[int, int] = (1, 32),
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    finite: bool = False,
    loop: int | None = None,
) -> torch.Tensor:
    """dtype [M, N] = (a [M, K] @ b [N, K]^T) * (scale_a * scale_b) + bias in float32, rounded once.

    Args:
        a: bfloat16, contiguous, 1 to MOST rows.
        codes: float8, b's, contiguous and not empty; NaN codes give NaN.
        exponents: uint8 [block rows, block cols], contiguous: b is codes times 2^(exponent - 127), exact in bfloat16 and
            finite, and so are products with a's numbers, which may be scaled instead of b (the emulated backend's
            limits of scales ensure both). None: b is the codes.
        block: rows and columns (a multiple of 32) of b that share an exponent.
        scale_a, scale_b: float32, one per row of a or b, or one for all; with exponents scale_b is 1.
        bias: float32 [N], or None.
        dtype: bfloat16 or float32.
        finite: no code is known to be NaN or Inf, which is faster.
        loop: one of ``inner_loops()``; None: that of products with many rows.
    """
    (m, k), (n, _) = a.shape, codes.shape
    assert 0 < m <= MOST and codes.shape[1] == k and not block[1] % 32, (a.shape, codes.shape, block)
    to = torch.empty(m, n, dtype=dtype, device="cpu")
    blocks = -(-n // block[0]) * -(-k // block[1])
    product = Product(
        address(a, torch.bfloat16, m * k),
        address(codes, codes.dtype, n * k),
        None if exponents is None else address(exponents, torch.uint8, blocks),
        address(scale_a, torch.float32, m if scale_a.numel() > 1 else 1),
        address(scale_b, torch.float32, n if scale_b.numel() > 1 else 1),
        None if bias is None else address(bias, torch.float32, n),
        address(to, dtype, m * n),
        *(m, n, k, *block),
        *(int(scale.numel() > 1) for scale in (scale_a, scale_b)),
        {"e4m3": 0, "e5m2": 1}[NAMES[codes.dtype]],
        int(finite),
        _TO_BFLOAT16[dtype],
    )
    if load_kernels().few_rows(ctypes.byref(product), loop or emulation.inner_loop(), thread_count(n * k)):
        raise MemoryError(f"no memory for {m} x {k} bfloat16 numbers")
    return to

"""MKL's GEMM of bfloat16 matrices with a float32 result, for processors with AMX, whose tile instructions it uses.

torch's CPU library has MKL in it and exports this function, but no operation of torch calls it for two matrices. The
alternative, ``torch.backends.mkldnn.matmul.fp32_precision = "bf16"`` around a float32 product, was used before and is
rejected: it is a setting of the whole process. It changes other threads' float32 products, and two threads that set and
restore it can leave it set.

Without AMX gemm.c is the faster one: MKL multiplies in float32 there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from .loops import check_matrices

_ROW_MAJOR, _AS_IS, _TRANSPOSED = 101, 111, 112
_INT_MAX = 2**31 - 1


@cache
def has_matmul() -> bool:
    """Whether this processor has AMX for bfloat16, and torch was built with an MKL that multiplies it."""
    return torch.cpu._is_amx_tile_supported() and _function() is not None


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T of bfloat16 matrices of any strides; works on any x86 processor.

    Products are exact, sums are float32. NaN and Inf go where IEEE has them; subnormal operands may count as zero.
    """
    (m, k), (n, _) = check_matrices(a, b)
    c = torch.zeros(m, n, dtype=torch.float32, device="cpu")
    if not (m and n and k):
        return c
    multiply = _function()
    assert multiply is not None, "torch was built without MKL"
    (a, turn_a, step_a), (b, turn_b, step_b) = _laid_out(a), _laid_out(b)
    assert max(m, n, k, step_a, step_b) <= _INT_MAX, f"MKL counts to 2^31 - 1: {m} x {k} by {k} x {n}"
    order_a, order_b = _TRANSPOSED if turn_a else _AS_IS, _AS_IS if turn_b else _TRANSPOSED
    to_a, to_b, to_c = a.data_ptr(), b.data_ptr(), c.data_ptr()
    multiply(_ROW_MAJOR, order_a, order_b, m, n, k, 1.0, to_a, step_a, to_b, step_b, 0.0, to_c, n)
    return c


def _laid_out(x: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
    """(x, or a copy if neither its rows nor its columns are dense; whether the dense ones are columns; their stride)."""
    rows, cols = x.shape
    if x.stride(1) == 1 and x.stride(0) >= cols:
        return x, False, x.stride(0)
    if x.stride(0) == 1 and x.stride(1) >= rows:
        return x, True, x.stride(1)
    return x.clone(memory_format=torch.contiguous_format), False, cols


@cache
def _function() -> Callable[..., None] | None:
    """cblas_gemm_bf16bf16f32 of the library that torch has loaded; None if it has none (Arm, macOS, other BLAS)."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(path)).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    order, size, pointer = ctypes.c_int, ctypes.c_int, ctypes.c_void_p
    function.argtypes = (
        *(order, order, order, size, size, size),
        *(ctypes.c_float, pointer, size, pointer, size, ctypes.c_float, pointer, size),
    )
    function.restype = None
    return function

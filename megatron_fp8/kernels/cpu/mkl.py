"""MKL's BF16 GEMM with float32 results, for CPUs with AMX.

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

ROW_MAJOR, AS_IS, TURNED = 101, 111, 112
"""Its words for how matrices lie."""
INT_MAX = 2**31 - 1
"""Its largest size and stride."""


@cache
def has_matmul() -> bool:
    """Whether this processor has AMX for bfloat16, and torch was built with an MKL that multiplies it."""
    return torch.cpu._is_amx_tile_supported() and function() is not None


@cache
def function() -> Callable[..., None] | None:
    """cblas_gemm_bf16bf16f32 of the library that torch has loaded; None if it has none (Arm, macOS, other BLAS)."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(path)).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    order, size, pointer = ctypes.c_int, ctypes.c_int, ctypes.c_void_p
    found.argtypes = (
        *(order, order, order, size, size, size),
        *(ctypes.c_float, pointer, size, pointer, size, ctypes.c_float, pointer, size),
    )
    found.restype = None
    return found

"""BF16 x BF16 -> float32 products on CPUs, where torch has none: which GEMM a processor gets.

| processor | GEMM |
|---|---|
| with AMX, and MKL in torch | MKL's (mkl.py) |
| with AVX512-BF16, and a C compiler | gemm.c |
| any other | none: callers multiply in float32, which is as exact; processors without BF16 lose no time by it |
"""

from __future__ import annotations

import torch

from . import cpu, in_memory, mkl


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``matmul`` is for operands like these: on a CPU that has a GEMM for them, and not small."""
    on_cpu = a.device.type == b.device.type == "cpu"
    large = a.numel() + b.numel() >= cpu.MIN_ELEMENTS
    return on_cpu and large and (mkl.has_matmul() or cpu.has_matmul())


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T of bfloat16 matrices of any strides."""
    a, b = in_memory(a), in_memory(b)
    return mkl.matmul(a, b) if mkl.has_matmul() else cpu.matmul(a, b)

"""BF16 products with float32 sums on CPUs, by gemm.c. Scales of sums are multiplied afterwards."""

from __future__ import annotations

import torch

from . import emulation
from .emulation import Operand


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T of bfloat16 matrices of any strides.

    Products are exact, sums are float32. The order of sums does not depend on M, N or the number of threads. NaN and Inf
    go where IEEE has them; subnormal operands may count as zero.
    """
    for x in (a, b):
        if not (x.ndim == 2 and x.dtype == torch.bfloat16 and x.is_cpu):
            raise AssertionError(f"a bfloat16 matrix on the CPU is needed, got {emulation.described(x)}")
    if a.shape[1] != b.shape[1]:
        raise AssertionError(
            f"the last dimensions must be equal: {emulation.described(a)}, {emulation.described(b)}"
        )
    product = emulation.multiply(Operand(a), Operand(b), torch.float32)
    assert product is not None, "without scales there is no range to leave"
    return product


def finish(
    sums: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """sums * (scale_a * scale_b) + bias in float32, rounded once to dtype; the memory of sums is used where it can be.

    Args:
        sums: float32 [M, N], contiguous.
        scale_a, scale_b: float32 [].
        bias: float32 [N], contiguous; None: 0.
        dtype: bfloat16 or float32.
    """
    rows, cols = sums.shape
    out = sums if dtype == torch.float32 else torch.empty(rows, cols, dtype=dtype, device="cpu")
    emulation.function_of("finish", dtype)(
        emulation.address(sums, torch.float32, rows * cols),
        emulation.address(out, dtype, rows * cols),
        rows,
        cols,
        emulation.address(scale_a, torch.float32, 1),
        emulation.address(scale_b, torch.float32, 1),
        None if bias is None else emulation.address(bias, torch.float32, cols),
        emulation.thread_count(sums.numel()),
    )
    return out

"""BF16 products with float32 sums on CPUs, by gemm.c or MKL. Scales of sums are multiplied afterwards."""

from __future__ import annotations

import torch

from . import emulation, mkl
from .emulation import Operand


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T of bfloat16 matrices of any strides: by gemm.c where it can be.

    Products are exact, sums are float32. NaN and Inf go where IEEE has them; subnormal operands may count as zero.
    """
    return own_matmul(a, b) if emulation.has_own_matmul() else mkl_matmul(a, b)


def own_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``matmul`` by gemm.c: the order of sums does not depend on M, N or the number of threads; subnormal operands
    may count as zero."""
    check_matrices(a, b)
    product = emulation.multiply(Operand(a), Operand(b), torch.float32)
    assert product is not None, "without scales there is no range to leave"
    return product


def mkl_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``matmul`` by MKL; works on any x86 processor."""
    (m, k), (n, _) = check_matrices(a, b)
    c = torch.empty(m, n, dtype=torch.float32, device="cpu")
    if not (m and n and k):
        return c.zero_()
    call = mkl.function()
    assert call is not None, "torch was built without MKL"
    (a, turn_a, step_a), (b, turn_b, step_b) = _laid_out(a), _laid_out(b)
    assert max(m, n, k, step_a, step_b) <= mkl.INT_MAX, f"MKL counts to 2^31 - 1: {m} x {k} by {k} x {n}"
    order_a, order_b = mkl.TURNED if turn_a else mkl.AS_IS, mkl.AS_IS if turn_b else mkl.TURNED
    to_a, to_b, to_c = a.data_ptr(), b.data_ptr(), c.data_ptr()
    call(mkl.ROW_MAJOR, order_a, order_b, m, n, k, 1.0, to_a, step_a, to_b, step_b, 0.0, to_c, n)
    return c


def _laid_out(x: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
    """(x, or a copy if neither its rows nor its columns are dense; whether the dense ones are columns; their
    stride)."""
    rows, cols = x.shape
    down, across = x.stride()
    if across == 1 and down >= cols:
        return x, False, down
    if down == 1 and across >= rows:
        return x, True, across
    return x.clone(memory_format=torch.contiguous_format), False, cols


def check_matrices(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Size, torch.Size]:
    """The shapes of a [M, K] and b [N, K]; AssertionError unless both are bfloat16 matrices on the CPU that
    contract."""
    for x in (a, b):
        if not (x.ndim == 2 and x.dtype == torch.bfloat16 and x.is_cpu):
            raise AssertionError(f"a bfloat16 matrix on the CPU is needed, got {emulation.described(x)}")
    if a.shape[1] != b.shape[1]:
        raise AssertionError(
            f"the last dimensions must be equal: {emulation.described(a)}, {emulation.described(b)}"
        )
    return a.shape, b.shape


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

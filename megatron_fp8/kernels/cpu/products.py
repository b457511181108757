"""Products of FP8 codes in C (gemm.c), decoded while the GEMM packs its panels; and of bfloat16 matrices.

Two inner loops are compiled, where the processor has their instructions: AVX512-BF16, and AMX. The faster one, AMX, is
taken, but where ``ONEDNN_MAX_CPU_ISA``, by which users keep torch's products off it, names a lesser one.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import NamedTuple

import torch

from . import loops, mkl

AVX512, AMX = 1, 2
"""What gemm.c calls its inner loops."""
# fmt: off
_BELOW_AMX = frozenset({
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2",
    "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512",
})
# fmt: on
_FORMATS = {torch.bfloat16: 0, torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}
_SQUARE = 32
"""Of k: those that gemm.c packs together, under one scale."""


class Operand(NamedTuple):
    """One side of a product, [rows, k].

    Attributes:
        values: float8_e4m3fn, float8_e5m2 or bfloat16, of any strides.
        scale: float32 or float8_e8m0fnu, one for each block, of any strides; None: 1.
        block: (rows, k) that share a scale, 0 meaning the whole extent.
        pow2: every scale is a power of two.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None
    block: tuple[int, int] = (0, 0)
    pow2: bool = False


class _Side(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("row_step", ctypes.c_int64),
        ("k_step", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("e8m0", ctypes.c_int32),
        ("scale", ctypes.c_void_p),
        ("block_rows", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
        ("scale_row_step", ctypes.c_int64),
        ("scale_k_step", ctypes.c_int64),
    )


class _Out(ctypes.Structure):
    _fields_ = (
        ("at", ctypes.c_void_p),
        ("bfloat16", ctypes.c_int32),
        ("add", ctypes.c_int32),
        ("bias", ctypes.c_void_p),
    )


@cache
def inner_loops() -> tuple[int, ...]:
    """The inner loops of this processor, fastest first; none without its instructions or without a C compiler."""
    if loops.reason() is not None:
        return ()
    found = loops.compiled().has_gemm()
    return tuple(loop for loop in (AMX, AVX512) if found & loop)


def inner_loop() -> int | None:
    """The one that products take; None: there is none."""
    found = inner_loops()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "")).upper()
    if limit in _BELOW_AMX:
        found = tuple(loop for loop in found if loop != AMX)
    return found[0] if found else None


def multiplies(a: Operand, b: Operand) -> bool:
    """Whether ``multiply`` takes these: plain CPU tensors, large enough to pay for packing, and scales along k that are
    powers of two, each for a multiple of 32."""
    if a.values.numel() + b.values.numel() < loops.MIN_PRODUCT:
        return False
    return all(map(_taken, (a, b))) and inner_loop() is not None


def _taken(of: Operand) -> bool:
    if of.values.dtype not in _FORMATS or not (_in_memory(of.values) and of.values.numel()):
        return False
    if of.scale is None or of.block[1] == 0:
        return True
    return of.pow2 and of.block[1] % _SQUARE == 0 and _in_memory(of.scale)


def _in_memory(x: torch.Tensor) -> bool:
    """Whether C can read x at its address."""
    return (
        x.is_cpu and type(x) in (torch.Tensor, torch.nn.Parameter) and not (x.is_neg() or x._is_zerotensor())
    )


def multiply(
    a: Operand,
    b: Operand,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    into: torch.Tensor | None = None,
    loop: int | None = None,
) -> torch.Tensor | None:
    """a [M, K] @ b [N, K]^T, scaled: sums * (scale_a * scale_b) + bias in float32, rounded once to dtype.

    Args:
        dtype: float32 or bfloat16.
        bias: float32 [N], contiguous.
        into: float32 [M, N], contiguous, to which the product is added (dtype float32, no bias); it is what is
        returned. loop: AVX512 or AMX, one that the processor has; None: ``inner_loop``.

    Returns:
        [M, N], or None where scales are so small or large that numbers or sums could leave bfloat16's normal range. An
        element depends on its row and column alone: the order of its sum is the same for any M, N and number of
        threads. NaN and Inf go where IEEE has them; subnormal numbers of bfloat16 operands count as zero.
    """
    (m, k), n = a.values.shape, b.values.shape[0]
    out = torch.empty(m, n, dtype=dtype, device="cpu") if into is None else into
    if into is not None and not (m and n and k):
        return into
    if not (m and n and k):
        return out.zero_() if bias is None else out.copy_(bias.expand(m, n))
    to = _Out(
        loops.address(out, dtype, m * n),
        int(dtype == torch.bfloat16),
        int(into is not None),
        None if bias is None else loops.address(bias, torch.float32, n),
    )
    values_a, values_b = _dense(a.values), _dense(b.values)
    done = loops.compiled().gemm(
        ctypes.byref(_side(a, values_a)),
        ctypes.byref(_side(b, values_b)),
        ctypes.byref(to),
        ctypes.c_int64(m),
        ctypes.c_int64(n),
        ctypes.c_int64(k),
        loop or inner_loop(),
        loops.thread_count(max(values_a.numel(), values_b.numel(), out.numel())),
    )
    if done < 0:
        raise MemoryError(f"no memory to pack matrices of {m} x {k} and {n} x {k}")
    return None if done else out


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if neither its rows nor its columns are dense."""
    return x if 1 in x.stride() else x.clone(memory_format=torch.contiguous_format)


def _side(of: Operand, values: torch.Tensor) -> _Side:
    """What C is told. A dimension of one element may have any stride."""
    row_step, k_step = values.stride()
    if values.shape[1] == 1:
        k_step = 1
    scale, (block_rows, block_k) = of.scale, of.block
    steps = (0, 0) if scale is None or scale.ndim < 2 else scale.stride()
    return _Side(
        values.data_ptr(),
        row_step,
        k_step,
        _FORMATS[values.dtype],
        int(scale is not None and scale.dtype != torch.float32),
        None if scale is None else scale.data_ptr(),
        block_rows,
        block_k,
        *steps,
    )


# ------------------------------------------------------------------------------------------------- bfloat16 matrices


def has_matmul() -> bool:
    """Whether this processor has a GEMM for bfloat16 that pays: gemm.c, or MKL's with AMX where nothing compiles C."""
    return has_own_matmul() or mkl.has_matmul()


def has_own_matmul() -> bool:
    """Whether this processor has the instructions for which gemm.c is written, and the kernels could be compiled."""
    return inner_loop() is not None


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [M, N] = a [M, K] @ b [N, K]^T of bfloat16 matrices of any strides: by gemm.c where it can be.

    Products are exact, sums are float32. NaN and Inf go where IEEE has them; subnormal operands may count as zero.
    """
    return own_matmul(a, b) if has_own_matmul() else mkl_matmul(a, b)


def own_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``matmul`` by gemm.c: the order of sums does not depend on M, N or the number of threads; subnormal operands
    count as zero."""
    check_matrices(a, b)
    product = multiply(Operand(a), Operand(b), torch.float32)
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
            raise AssertionError(f"a bfloat16 matrix on the CPU is needed, got {loops.described(x)}")
    if a.shape[1] != b.shape[1]:
        raise AssertionError(f"the last dimensions must be equal: {loops.described(a)}, {loops.described(b)}")
    return a.shape, b.shape

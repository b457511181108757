"""NVFP4 in C: casts, decoding, and products of few rows.

Casts and decoding (fp4.c) have the bits of numerics/nvfp4.py, products (skinny_gemm_fp4.c) those of gemm.c. A cast is
two calls, of which the first finds amaxes and the second makes scales and codes, so that ranks can reduce the tensor's
amaxes in between.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from ...numerics.cast import RandomKey
from ...numerics.nvfp4 import BLOCK, padded_cols
from ...numerics.rule import Direction, Rule
from . import emulation
from .matrix_quantize import DTYPES
from .skinny_gemm import MOST

_MASK = 0xFFFFFFFF


class Draws(NamedTuple):
    """The random bytes of stochastic rounding.

    Attributes:
        key: the stream.
        first: logical index of the matrix's first element.
        step: from one row's first element to the next one's.
    """

    key: RandomKey
    first: int
    step: int


class CastStruct(ctypes.Structure):
    """fp4.c's Fp4Cast."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dtype", "square", "hadamard", "stochastic")),
        ("codes", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("block_amax", ctypes.c_void_p * 2),
        ("amax", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("step", ctypes.c_int64),
        ("key", ctypes.c_uint32 * 2 * 2),
        ("counter", ctypes.c_uint32 * 2),
    )


class CodesAndScales(NamedTuple):
    """One side [rows, cols]: codes uint8 [rows, padded cols / 2], scales float8_e4m3fn [row blocks, column blocks]."""

    codes: torch.Tensor
    scales: torch.Tensor


class Amaxes(NamedTuple):
    """What the first call finds.

    Attributes:
        tensor: float32 [2], the rowwise and the columnwise side's (the rowwise one's twice, where they do not differ).
        nonfinite: how many elements are NaN or Inf.
        blocks: float32, in the order of fp4.c; the columnwise side's only where it has its own.
    """

    tensor: torch.Tensor
    nonfinite: int
    blocks: list[torch.Tensor]


def takes(x: torch.Tensor) -> bool:
    """Whether C casts x [rows, cols]."""
    return x.dtype in DTYPES and emulation.usable(x)


def find_amaxes(x: torch.Tensor, rule: Rule, direction: Direction) -> Amaxes:
    """Amaxes of x [rows, cols], which C ``takes``, under an E2M1 rule."""
    squares = padded_cols(x.shape[0]) * padded_cols(x.shape[1]) // BLOCK**2
    symmetric = rule.granularity.symmetric
    sizes = [squares if symmetric else squares * BLOCK]
    if direction != "rowwise" and not symmetric:
        sizes *= 2
    blocks = [torch.empty(size, dtype=torch.float32, device="cpu") for size in sizes]
    tensor = torch.empty(2, dtype=torch.float32, device="cpu")
    struct = _struct(x, rule, Amaxes(tensor, 0, blocks))
    function = emulation.load_kernels().fp4_amaxes
    function.restype = ctypes.c_int64
    nonfinite = function(ctypes.byref(struct), emulation.thread_count(x.numel()))
    return Amaxes(tensor, nonfinite, blocks)


def encode(
    x: torch.Tensor, rule: Rule, direction: Direction, amaxes: Amaxes, draws: Draws | None
) -> tuple[CodesAndScales | None, CodesAndScales | None]:
    """Codes and scales of the rowwise side of x [rows, cols], and of the columnwise one [cols, rows].

    Args:
        amaxes: of ``find_amaxes`` for the same x, rule and direction; the tensor's may have grown since. Of Inf it
            becomes 2688, which has the same scale.
        draws: None rounds to nearest.
    """
    struct = _struct(x, rule, amaxes)
    sides: list[CodesAndScales | None] = [None, None]
    for side, (rows, cols) in enumerate((x.shape, x.shape[::-1])):
        symmetric = rule.granularity.symmetric
        if direction == ("columnwise", "rowwise")[side] and not (symmetric and side == 0):
            continue
        blocks = -(-rows // rule.granularity.rows), padded_cols(cols) // BLOCK
        made = CodesAndScales(
            torch.empty(rows, padded_cols(cols) // 2, dtype=torch.uint8, device="cpu"),
            torch.empty(blocks, dtype=torch.float8_e4m3fn, device="cpu"),
        )
        struct.codes[side], struct.scales[side] = made.codes.data_ptr(), made.scales.data_ptr()
        sides[side] = made
    if draws is not None:
        fill_draws(struct, draws)
    emulation.load_kernels().fp4_codes(ctypes.byref(struct), emulation.thread_count(x.numel()))
    return sides[0], sides[1]


def fill_draws(struct: CastStruct, draws: Draws) -> None:
    """Writes the random bytes' keys, counter and indices into C's struct."""
    key = draws.key
    struct.stochastic, struct.first, struct.step = 1, draws.first, draws.step
    for side, site in enumerate((key.site, ~key.site)):
        struct.key[side][0], struct.key[side][1] = key.seed & _MASK, site & _MASK
    struct.counter[0], struct.counter[1] = key.iteration & _MASK, key.microbatch & _MASK


def _struct(x: torch.Tensor, rule: Rule, amaxes: Amaxes) -> CastStruct:
    """What both calls are told."""
    rows, cols = x.shape
    assert rows and cols, "C divides by both"
    struct = CastStruct(emulation.address(x, x.dtype, rows * cols), rows, cols, DTYPES[x.dtype])
    struct.square, struct.hadamard = rule.granularity.symmetric, rule.hadamard
    struct.amax = emulation.address(amaxes.tensor, torch.float32, 2)
    for side, blocks in enumerate(amaxes.blocks):
        struct.block_amax[side] = blocks.data_ptr()
    return struct


def decode(codes: torch.Tensor, scales: torch.Tensor, block_rows: int) -> torch.Tensor:
    """bfloat16 [rows, cols] of packed codes [rows, cols / 2] times their blocks' scales: exact.

    Args:
        codes: float4_e2m1fn_x2; cols is a multiple of 16.
        scales: float8_e4m3fn [ceil(rows / block_rows), cols / 16].
    """
    rows, pairs = codes.shape
    blocks = 2 * pairs // BLOCK
    values = torch.empty(rows, 2 * pairs, dtype=torch.bfloat16, device="cpu")
    emulation.load_kernels().fp4_decode(
        emulation.address(codes, codes.dtype, rows * pairs),
        emulation.address(scales, torch.float8_e4m3fn, -(-rows // block_rows) * blocks),
        ctypes.c_int64(rows),
        ctypes.c_int64(blocks),
        ctypes.c_int64(block_rows),
        ctypes.c_void_p(values.data_ptr()),
        emulation.thread_count(values.numel()),
    )
    return values


class ProductStruct(ctypes.Structure):
    """skinny_gemm_fp4.c's Fp4Product."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "scale", "factor", "bias", "to")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k")),
        ("to_bfloat16", ctypes.c_int32),
    )


def takes_few_rows(rows: int, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``multiply_few_rows`` takes packed codes [N, K / 2] in blocks of 16 x 16, for a result of dtype."""
    return (
        0 < rows <= MOST
        and emulation.inner_loop() == emulation.AVX512
        and dtype in (torch.bfloat16, torch.float32)
        and 2 * codes.numel() >= emulation.MIN_PRODUCT
        and emulation.is_plain(codes)
        and emulation.is_plain(scales)
    )


def multiply_few_rows(
    a: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """dtype [M, N] = (a [M, K] @ b [N, K]^T) * factor + bias, as ``emulation.multiply`` gives it, to the bit.

    Args:
        a: bfloat16, contiguous, 1 to 16 rows.
        codes: float4_e2m1fn_x2 [N, K / 2], b's, which ``takes_few_rows`` takes.
        scales: float8_e4m3fn [ceil(N / 16), K / 16].
        factor: float32 [].
        bias: float32 [N], or None.

    Returns:
        None where factor is outside of ``emulation.multiply``'s range.
    """
    (m, k), n = a.shape, codes.shape[0]
    assert 0 < m <= MOST and codes.shape[1] * 2 == k and k % BLOCK == 0, (a.shape, codes.shape)
    to = torch.empty(m, n, dtype=dtype, device="cpu")
    product = ProductStruct(
        emulation.address(a, torch.bfloat16, m * k),
        emulation.address(codes, codes.dtype, n * k // 2),
        emulation.address(scales, torch.float8_e4m3fn, -(-n // BLOCK) * (k // BLOCK)),
        emulation.address(factor, torch.float32, 1),
        None if bias is None else emulation.address(bias, torch.float32, n),
        emulation.address(to, dtype, m * n),
        *(m, n, k, int(dtype == torch.bfloat16)),
    )
    done = emulation.load_kernels().few_rows_fp4(ctypes.byref(product), emulation.thread_count(n * k))
    if done < 0:
        raise MemoryError(f"no memory for {m} x {k} bfloat16 numbers")
    return None if done else to

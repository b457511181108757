"""Amaxes of a tile, two 16-bit numbers at a time.

The amax of BF16 or FP16 numbers is one of them, so no widening is needed. Two neighbours of a row are loaded into one
register. The instruction ``max.NaN.xorsign.abs`` takes the larger magnitude in each half of two registers: half an
instruction per value, where widening, clearing the sign and comparing take three. The result's sign (the product of both
signs) is meaningless and is cleared at the end. NaN wins as the canonical NaN, whose bits compare above Inf; the caller
sees that the tile has a NaN and repeats the reduction with the instruction that ignores NaN.

The interpreter compares the halves as integers: same result for numbers, and NaN wins too, with other NaN bits.
float32 tiles are compared as integers, one value at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device_math import COMPILED, as_bits, count_nonfinite, magnitudes, without_nan


@triton.jit
def pairs(tile):
    """int32 [ROWS, COLS / 2] of a 16-bit tile [ROWS, COLS]: the left neighbour is the lower half."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    left, right = tl.split(tl.reshape(tile, (ROWS, COLS // 2, 2)))
    if COMPILED:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [left, right], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = left.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (right.to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _larger_bfloat16(a, b):
    """The larger magnitude of each half, with a meaningless sign; NaN wins."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _larger_float16(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _larger_number_bfloat16(a, b):
    """``_larger_bfloat16``, but ignores NaN."""
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _larger_number_float16(a, b):
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _largest_pairs(words, axis: tl.constexpr, DTYPE: tl.constexpr, NAN: tl.constexpr):
    """Largest magnitudes of pairs along an axis, as pairs; ``_halves`` clears the signs."""
    if COMPILED:
        if tl.bfloat16 == DTYPE:
            if NAN:
                return tl.reduce(words, axis, _larger_bfloat16)
            else:
                return tl.reduce(words, axis, _larger_number_bfloat16)
        else:
            if NAN:
                return tl.reduce(words, axis, _larger_float16)
            else:
                return tl.reduce(words, axis, _larger_number_float16)
    else:
        INF16: tl.constexpr = 0x7F80 if tl.bfloat16 == DTYPE else 0x7C00
        left = words & 0x7FFF
        right = (words >> 16) & 0x7FFF
        if not NAN:
            left = tl.where(left > INF16, 0, left)
            right = tl.where(right > INF16, 0, right)
        return tl.max(left, axis) | (tl.max(right, axis) << 16)


@triton.jit
def _halves(words, DTYPE: tl.constexpr, NAN: tl.constexpr):
    """(left, right) magnitudes of pairs as float32 bits in int32. NaN is above INF, or 0 if not NAN."""
    if tl.bfloat16 == DTYPE:
        left = (words & 0x7FFF) << 16
        right = words & 0x7FFF0000
    else:
        left = _float16_bits(words & 0x7FFF)
        right = _float16_bits((words >> 16) & 0x7FFF)
    if not NAN:
        left = without_nan(left)
        right = without_nan(right)
    return left, right


@triton.jit
def _float16_bits(bits):
    return as_bits(bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)) & 0x7FFFFFFF


@triton.jit
def _float32_bits(tile, NAN: tl.constexpr):
    bits = magnitudes(tile)
    if not NAN:
        bits = without_nan(bits)
    return bits


@triton.jit
def row_amax_bits(tile, WIDTH: tl.constexpr, NAN: tl.constexpr):
    """int32 [ROWS, COLS / WIDTH]: amax, as float32 bits, of each 1 x WIDTH block of a tile [ROWS, COLS].

    NAN: a block with a NaN has bits above INF; otherwise NaN is ignored, and a block of NaN alone has 0.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    if tile.dtype == tl.float32:
        return tl.max(tl.reshape(_float32_bits(tile, NAN), (ROWS, COLS // WIDTH, WIDTH)), 2)
    else:
        words = tl.reshape(pairs(tile), (ROWS, COLS // WIDTH, WIDTH // 2))
        left, right = _halves(_largest_pairs(words, 2, tile.dtype, NAN), tile.dtype, NAN)
        return tl.maximum(left, right)


@triton.jit
def col_amax_bits(tile, HEIGHT: tl.constexpr, NAN: tl.constexpr):
    """int32 [ROWS / HEIGHT, COLS]: amax bits of each HEIGHT x 1 block of a tile with rows in tiles.rows_of order.

    NAN as in ``row_amax_bits``.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    DOWN: tl.constexpr = ROWS // HEIGHT
    if tile.dtype == tl.float32:
        return tl.max(tl.max(tl.reshape(_float32_bits(tile, NAN), (4, DOWN, HEIGHT // 4, COLS)), 0), 1)
    else:
        words = tl.reshape(pairs(tile), (4, DOWN, HEIGHT // 4, COLS // 2))
        words = _largest_pairs(_largest_pairs(words, 0, tile.dtype, NAN), 1, tile.dtype, NAN)
        left, right = _halves(words, tile.dtype, NAN)
        return tl.reshape(tl.join(left, right), (DOWN, COLS))


@triton.jit
def tile_amax_bits(tile, NAN: tl.constexpr):
    """int32 []: amax bits of a tile; NAN as in ``row_amax_bits``."""
    if tile.dtype == tl.float32:
        return tl.max(_float32_bits(tile, NAN))
    else:
        left, right = _halves(_largest_pairs(pairs(tile), None, tile.dtype, NAN), tile.dtype, NAN)
        return tl.maximum(left, right)


@triton.jit
def nonfinite_in(tile):
    """int32 []: count of NaN and Inf in a tile."""
    if tile.dtype == tl.float32:
        return count_nonfinite(magnitudes(tile))
    else:
        INF16: tl.constexpr = 0x7F80 if tile.dtype == tl.bfloat16 else 0x7C00
        words = pairs(tile)
        found = ((words & 0x7FFF) >= INF16).to(tl.int32) + (((words >> 16) & 0x7FFF) >= INF16).to(tl.int32)
        return tl.sum(found)

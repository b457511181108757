"""The largest magnitudes of a tile, two 16-bit numbers at a time.

An amax of BF16 or FP16 numbers is one of them, so nothing need be widened to find it. Two neighbours of a row share a
register as they were loaded. One instruction, ``max.NaN.xorsign.abs``, takes the larger magnitude of each of two pairs:
an amax costs half an instruction a value where widening, clearing the sign and comparing cost three. The result's sign is
of no use (that of both multiplied) and is cleared at the end. NaN wins, as the canonical NaN, which is above Inf as bits
are compared: whoever asks sees that the tile has one, and asks again with the instruction in which NaN loses.

Interpreted, the pairs' halves are compared as integers: the same for numbers, and NaN wins too, with other bits of a NaN.
float32 tiles are compared as integers, one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device_math import COMPILED, as_bits, count_nonfinite, magnitudes, without_nan


@triton.jit
def pairs(tile):
    """int32 [ROWS, COLS / 2] of a 16-bit tile [ROWS, COLS]: the left one of two neighbours is the lower half."""
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
    """The larger magnitude of each half, with some sign; NaN wins."""
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
    """The same, but NaN loses."""
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
    """The largest magnitudes of pairs along an axis, still pairs; signs are to be cleared (``_halves``)."""
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
    """(int32 float32 bits of the left, of the right) magnitudes of pairs. NaN is above INF, or 0 if not NAN."""
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
def row_tops(tile, WIDTH: tl.constexpr, NAN: tl.constexpr):
    """Largest magnitude bits (float32's, int32) [ROWS, COLS / WIDTH] of each 1 x WIDTH block of a tile [ROWS, COLS].

    With NAN a block that has a NaN has bits above INF; else NaN does not count, and a block of NaN has 0.
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
def col_tops(tile, HEIGHT: tl.constexpr, NAN: tl.constexpr):
    """Largest magnitude bits [ROWS / HEIGHT, COLS] of each HEIGHT x 1 block of a tile whose rows lie as tiles.rows_of;
    NAN as in ``row_tops``."""
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
def top_of(tile, NAN: tl.constexpr):
    """Largest magnitude bits [] of a tile; NAN as in ``row_tops``."""
    if tile.dtype == tl.float32:
        return tl.max(_float32_bits(tile, NAN))
    else:
        left, right = _halves(_largest_pairs(pairs(tile), None, tile.dtype, NAN), tile.dtype, NAN)
        return tl.maximum(left, right)


@triton.jit
def nonfinite_in(tile):
    """int32 [] number of NaN and Inf in a tile."""
    if tile.dtype == tl.float32:
        return count_nonfinite(magnitudes(tile))
    else:
        INF16: tl.constexpr = 0x7F80 if tile.dtype == tl.bfloat16 else 0x7C00
        words = pairs(tile)
        found = ((words & 0x7FFF) >= INF16).to(tl.int32) + (((words >> 16) & 0x7FFF) >= INF16).to(tl.int32)
        return tl.sum(found)

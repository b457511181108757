"""E2M1 codes, block scales, transform and random bytes in Triton. Same bits as numerics/nvfp4.py.

Blackwell rounds two float32 to E2M1 by one instruction, ``cvt.rn.satfinite.e2m1x2``: to nearest even, saturating, -0 with
its sign. Compiled for compute capability 10.0 and newer, codes come from it; elsewhere, and if they are rounded
stochastically, from integer and float32 arithmetic. The instruction makes 6 of NaN, so callers put 0 in its place first.

Rejected: ``cvt.rs`` for stochastic rounding. sm_120 does not have it: Transformer Engine's gradients became zeros there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from .device_math import (
    COMPILED,
    FLT_MAX,
    INF,
    as_bits,
    as_float,
    decode,
    divide,
    encode,
    narrow,
    reciprocal,
    widen,
)
from .tiles import rows_of

ONE = tl.constexpr(127 << 23)
SIX = tl.constexpr(0x40C00000)
SIXTH = tl.constexpr(0.1666666716337204)  # float32(1 / 6)
LARGEST = tl.constexpr(2688.0)


@triton.jit
def block_scales(bits, amax):
    """(E4M3 scales as uint8, float32 factors of codes) of block amaxes given by their bits, in a tensor of this amax
    (float32 [], not Inf): numerics/nvfp4.py's ``block_scales`` and ``encoding_factors``."""
    scale = tl.minimum(divide(LARGEST, amax), FLT_MAX)
    code = encode(tl.minimum(as_float(bits) * (scale * SIXTH), 448.0), True)
    return code, tl.minimum(reciprocal(decode(code, True) * divide(1.0, scale)), FLT_MAX)


@triton.jit
def nearest(x):
    """int32 E2M1 codes of float32 x, which is not NaN: to nearest, ties to the even code."""
    bits = as_bits(x)
    inside = tl.minimum(bits & 0x7FFFFFFF, SIX)
    exponent = tl.maximum(inside & INF, ONE)
    magic = exponent + (22 << 23)  # the sum rounds to the last bit that a code has
    code = as_bits(as_float(inside) + as_float(magic)) - magic + ((exponent - ONE) >> 22)
    return code | ((bits >> 28) & 8)


@triton.jit
def stochastic(x, drawn):
    """``nearest``, but 256ths of a step, the bytes ``drawn`` (int32), are added before rounding down."""
    HALF: tl.constexpr = 126 << 23
    bits = as_bits(x)
    inside = tl.minimum(bits & 0x7FFFFFFF, SIX)
    step = as_float(tl.maximum(inside & INF, ONE) - (9 << 23))
    moved = tl.minimum(as_bits(as_float(inside) + (as_float(drawn | 0x4B000000) - 8388608.0) * step), SIX)
    code = tl.maximum((tl.maximum(moved, HALF) >> 22) - 252, (moved >= HALF).to(tl.int32))
    return code | ((bits >> 28) & 8)


@triton.jit
def words_of(x, drawn, STOCHASTIC: tl.constexpr):
    """int32 [A, B]: words of eight codes each, the first in the lowest bits, of float32 x [A, B, 8].

    drawn: random bytes of x's shape, if STOCHASTIC.
    """
    if STOCHASTIC:
        return pack(stochastic(x, drawn))
    elif COMPILED and cuda_capability_geq(10, 0):
        a, b, c, d, e, f, g, h = eighths(x)
        return tl.inline_asm_elementwise(
            """{ .reg .b8 first, second, third, fourth;
            cvt.rn.satfinite.e2m1x2.f32 first, $2, $1; cvt.rn.satfinite.e2m1x2.f32 second, $4, $3;
            cvt.rn.satfinite.e2m1x2.f32 third, $6, $5; cvt.rn.satfinite.e2m1x2.f32 fourth, $8, $7;
            mov.b32 $0, {first, second, third, fourth}; }""",
            "=r,f,f,f,f,f,f,f,f", [a, b, c, d, e, f, g, h], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return pack(nearest(x))


@triton.jit
def pack(codes):
    """int32 [A, B]: words of int32 codes [A, B, 8]."""
    a, b, c, d, e, f, g, h = eighths(codes)
    low = a | (b << 4) | (c << 8) | (d << 12)
    return low | (e << 16) | (f << 20) | (g << 24) | (h << 28)


@triton.jit
def eighths(x):
    """The eight parts [A, B] of x [A, B, 8], in order."""
    x = tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2))
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    first, fifth = tl.split(a)
    third, seventh = tl.split(c)
    second, sixth = tl.split(b)
    fourth, eighth = tl.split(d)
    return first, second, third, fourth, fifth, sixth, seventh, eighth


@triton.jit
def columns(tile):
    """[ROWS / 16, COLS, 16] of a tile [ROWS, COLS] with rows in ``rows_of(ROWS, 16)`` order: each column's blocks."""
    ROWS: tl.constexpr = tile.shape[0]
    return tl.permute(tl.reshape(tile, (16, ROWS // 16, tile.shape[1])), (1, 2, 0))


@triton.jit
def hadamard(x):
    """float32 x [A, B, 16] times diag(signs) H / 4, rounded to bfloat16: numerics/nvfp4.py's ``hadamard``."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    negative = (0xD7E8 >> tl.arange(0, 16)) & 1  # of + + + - + - - - - - - + - + - -
    x = as_float(as_bits(x) ^ (negative << 31)[None, None, :])
    x = tl.permute(tl.reshape(x, (A, B, 2, 2, 2, 2)), (0, 1, 5, 4, 3, 2))
    for _ in tl.static_range(4):  # strides 8, 4, 2 and 1 are the last axis in turn
        first, second = tl.split(x)
        x = tl.permute(tl.join(first + second, first - second), (0, 1, 5, 2, 3, 4))
    x = tl.reshape(tl.permute(x, (0, 1, 5, 4, 3, 2)), (A, B, 16))
    return widen(narrow(x * 0.25, tl.bfloat16))


@triton.jit
def random_bytes(
    first, step, seed, site, iteration, microbatch, down, across,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """int32 [ROWS, COLS], rows in ``rows_of(ROWS, 16)`` order: the random bytes of tile [down, across].

    first, step: logical index of the matrix's first element; from one row to the next. seed to microbatch: a RandomKey's
    numbers as int32. ALIGNED: first and step are multiples of 16, so that a Philox block serves 16 columns.
    """
    start = first + (down * ROWS + rows_of(ROWS, 16)).to(tl.int64) * step + across * COLS
    if ALIGNED:
        block = (start >> 4)[:, None] + tl.arange(0, COLS // 16)[None, :]
        a, b, c, d = philox(block, seed, site, iteration, microbatch)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLS // 4))
        shift = (8 * tl.arange(0, 4))[None, None, :]
        return tl.reshape((words[:, :, None] >> shift) & 0xFF, (ROWS, COLS))
    else:
        index = start[:, None] + tl.arange(0, COLS)[None, :]
        a, b, c, d = philox(index >> 4, seed, site, iteration, microbatch)
        word = (index >> 2) & 3
        chosen = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
        return (chosen >> (8 * (index & 3)).to(tl.int32)) & 0xFF


@triton.jit
def philox(index, seed, site, iteration, microbatch):
    """The four words, as int32, of Philox4x32-10 at counter = int64 index: numerics/cast.py's ``philox_words``."""
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0) + iteration.to(tl.uint32, bitcast=True)
    c3 = tl.zeros_like(c0) + microbatch.to(tl.uint32, bitcast=True)
    k0 = seed.to(tl.uint32, bitcast=True)
    k1 = site.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = product1.to(tl.uint32)
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = product0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return (
        c0.to(tl.int32, bitcast=True),
        c1.to(tl.int32, bitcast=True),
        c2.to(tl.int32, bitcast=True),
        c3.to(tl.int32, bitcast=True),
    )

"""The passes over a matrix, as Triton kernels. Each program takes one tile; quantize.py launches them.

The first arguments are a TileSource's (tiles.load). row_codes uint8 [rows, cols] and col_codes uint8 [cols,
col_stride] are contiguous; amaxes are int32 views of float32; flags say which of them exist. tiles.place gives a
program's tile. Rows beyond the matrix are zeros in a tile, and so are their codes, up to col_stride >= rows.

Amaxes first include NaN, whose bits are greater than Inf's. Only a tile whose largest value is Inf or NaN is reduced
again, to count such elements and to ignore NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device_math import (
    INF,
    as_bits,
    cast_scale,
    divide,
    encode,
    encode_word,
    record,
    scales,
    widen,
)
from .gemm_layouts import tiled_at
from .tile_amax import col_amax_bits, nonfinite_in, row_amax_bits, tile_amax_bits
from .tiles import load, load_halves, place, quarters, rows_of, store_rows, store_turned

# An arena's numbers may be 16-byte aligned or not: one compiled variant serves both.
_NUMBERS = ("given", "amax", "nonfinite", "running")


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def find_amaxes(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_amax, col_amax, amax, nonfinite, running,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, RUNNING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Updates amaxes of rows [rows], columns [cols] and the matrix by their maximum; the matrix's also updates
    ``running``."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    row_bits, col_bits, largest = _amax_bits(tile, ROWWISE, COLUMNWISE, COLS, ROWS, True)
    count = tl.zeros_like(largest)
    if largest >= INF:
        count = nonfinite_in(tile)
        row_bits, col_bits, largest = _amax_bits(tile, ROWWISE, COLUMNWISE, COLS, ROWS, False)
    down, across = place(cols, COLS)
    row = (down * ROWS + rows_of(ROWS))[:, None]
    col = (across * COLS + tl.arange(0, COLS))[None, :]
    if ROWWISE:
        tl.atomic_max(row_amax + row, row_bits, mask=row < rows, sem="relaxed")
    if COLUMNWISE:
        tl.atomic_max(col_amax + col, col_bits, mask=col < cols, sem="relaxed")
    if RECORD:
        record(amax, nonfinite, largest, count)
    if RUNNING:
        tl.atomic_max(running, largest, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def find_gradient_amaxes(
    x, x_stride, first, first_stride, second, rows, half,
    row_amax, col_amax, amax, nonfinite, running,
    WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, RUNNING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``find_amaxes`` of SwiGLU's gradient [rows, 2 half], both halves at once."""
    dgate, dup = load_halves(x, x_stride, first, first_stride, second, rows, half, WEIGHTED, ROWS, COLS)
    gate_rows, gate_cols, gate_top = _amax_bits(dgate, ROWWISE, COLUMNWISE, COLS, ROWS, True)
    up_rows, up_cols, up_top = _amax_bits(dup, ROWWISE, COLUMNWISE, COLS, ROWS, True)
    largest = tl.maximum(gate_top, up_top)
    count = tl.zeros_like(largest)
    if largest >= INF:
        count = nonfinite_in(dgate) + nonfinite_in(dup)
        gate_rows, gate_cols, gate_top = _amax_bits(dgate, ROWWISE, COLUMNWISE, COLS, ROWS, False)
        up_rows, up_cols, up_top = _amax_bits(dup, ROWWISE, COLUMNWISE, COLS, ROWS, False)
        largest = tl.maximum(gate_top, up_top)
    down, across = place(half, COLS)
    row = (down * ROWS + rows_of(ROWS))[:, None]
    col = (across * COLS + tl.arange(0, COLS))[None, :]
    if ROWWISE:
        tl.atomic_max(row_amax + row, tl.maximum(gate_rows, up_rows), mask=row < rows, sem="relaxed")
    if COLUMNWISE:
        tl.atomic_max(col_amax + col, gate_cols, mask=col < half, sem="relaxed")
        tl.atomic_max(col_amax + half + col, up_cols, mask=col < half, sem="relaxed")
    if RECORD:
        record(amax, nonfinite, largest, count)
    if RUNNING:
        tl.atomic_max(running, largest, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def cast_tensor(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_codes, col_codes, col_stride, given, scale_inv, amax, nonfinite, epsilon, factor,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, E4M3: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Casts with one scale: the given one (KIND 'given'), or a scale of KIND from the given amax."""
    if KIND == "given":
        scale = tl.load(given)
        inverse = divide(1.0, scale)
    else:
        scale, inverse = scales(as_bits(tl.load(given)), epsilon, factor, E4M3, KIND)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, inverse)
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    down, across = place(cols, COLS)
    top, left = down * ROWS, across * COLS
    if RECORD:
        largest = tile_amax_bits(tile, True)
        count = tl.zeros_like(largest)
        if largest >= INF:
            count = nonfinite_in(tile)
            largest = tile_amax_bits(tile, False)
        record(amax, nonfinite, largest, count)
    if ROWWISE:
        store_rows(row_codes, encode(widen(tile) * scale, E4M3), top, left, rows, cols)
    if COLUMNWISE:
        store_turned(col_codes, _words(tile, scale, E4M3), top, left, col_stride, cols)


@triton.jit
def cast_rows(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_codes, col_codes, col_stride, row_amax, col_amax, row_scale, col_scale, epsilon, factor,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    E4M3: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Casts with one scale per row for row_codes, one per column for col_codes, from their amaxes."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    down, across = place(cols, COLS)
    top, left = down * ROWS, across * COLS
    if ROWWISE:
        row = top + rows_of(ROWS)
        bits = tl.load(row_amax + row, mask=row < rows, other=0)
        scale, inverse = scales(bits, epsilon, factor, E4M3, KIND)
        if left == 0:
            tl.store(row_scale + row, inverse, mask=row < rows)
        store_rows(row_codes, encode(widen(tile) * scale[:, None], E4M3), top, left, rows, cols)
    if COLUMNWISE:
        col = left + tl.arange(0, COLS)
        bits = tl.load(col_amax + col, mask=col < cols, other=0)
        scale, inverse = scales(bits, epsilon, factor, E4M3, KIND)
        if top == 0:
            tl.store(col_scale + col, inverse, mask=col < cols)
        store_turned(col_codes, _words(tile, scale[None, :], E4M3), top, left, col_stride, cols)


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def quantize_tiles(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_codes, col_codes, col_stride, row_scale, row_major, row_minor, col_scale, col_major, col_minor,
    amax, nonfinite, epsilon, factor,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, E4M3: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, SQUARE: tl.constexpr, TILED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Casts with one scale per block; a block's elements are all in this tile. Scales have strides major (rows of codes),
    minor; with TILED the layout of gemm_layouts.tiled_at, E8M0 for each 32 of a block. A row of other square blocks'
    scales is padded with zeros to ``major``."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    ALONG_ROWS: tl.constexpr = ROWWISE and not SQUARE
    ALONG_COLS: tl.constexpr = COLUMNWISE and not SQUARE
    row_bits, col_bits, largest = _amax_bits(tile, ALONG_ROWS, ALONG_COLS, BLOCK, BLOCK, True)
    count = tl.zeros_like(largest)
    by_row = cast_scale(row_bits, epsilon, factor, E4M3, KIND, FINITE=True)
    by_col = cast_scale(col_bits, epsilon, factor, E4M3, KIND, FINITE=True)
    if largest >= INF:
        count = nonfinite_in(tile)
        row_bits, col_bits, largest = _amax_bits(tile, ALONG_ROWS, ALONG_COLS, BLOCK, BLOCK, False)
        by_row = cast_scale(row_bits, epsilon, factor, E4M3, KIND, FINITE=False)
        by_col = cast_scale(col_bits, epsilon, factor, E4M3, KIND, FINITE=False)
    if RECORD:
        record(amax, nonfinite, largest, count)
    DOWN: tl.constexpr = ROWS // BLOCK
    ACROSS: tl.constexpr = COLS // BLOCK
    down, across = place(cols, COLS)
    top, left = down * ROWS, across * COLS
    REPEAT: tl.constexpr = BLOCK // 32  # blocks of a tile of scales that share one
    if SQUARE:
        scale, inverse = scales(largest, epsilon, factor, E4M3, KIND)
        if ROWWISE:
            if TILED:
                _store_tile(row_scale, inverse, down, across, row_major, rows, cols, BLOCK)
            else:
                _store_square(row_scale, inverse, down, across, row_major, tl.cdiv(cols, BLOCK))
            store_rows(row_codes, encode(widen(tile) * scale, E4M3), top, left, rows, cols)
        if COLUMNWISE:
            if TILED:
                _store_tile(col_scale, inverse, across, down, col_major, cols, rows, BLOCK)
            else:
                _store_square(col_scale, inverse, across, down, col_major, tl.cdiv(rows, BLOCK))
            store_turned(col_codes, _words(tile, scale, E4M3), top, left, col_stride, cols)
    # Stored scales have an axis more: the compiler then hands amaxes, not scales, to the threads that store them, and
    # each scale is computed once.
    if ALONG_ROWS:
        row = (top + rows_of(ROWS))[:, None]
        block = (across * ACROSS + tl.arange(0, ACROSS))[None, :]
        _, inverse = scales(row_bits[:, :, None], epsilon, factor, E4M3, KIND)
        if TILED:
            exponent = _exponent(inverse, KIND)
            store_tiled(row_scale, exponent, row, block, row_major, rows, tl.cdiv(cols, 32), 127, REPEAT)
        else:
            at = row_scale + row.to(tl.int64) * row_major + block.to(tl.int64) * row_minor
            tl.store(at[:, :, None], inverse, mask=((row < rows) & (block * BLOCK < cols))[:, :, None])
    if ALONG_COLS:
        col = (left + tl.arange(0, COLS))[None, :]
        block = (down * DOWN + tl.arange(0, DOWN))[:, None]
        _, inverse = scales(col_bits[:, :, None], epsilon, factor, E4M3, KIND)
        if TILED:
            exponent = _exponent(inverse, KIND)
            store_tiled(col_scale, exponent, col, block, col_major, cols, tl.cdiv(rows, 32), 127, REPEAT)
        else:
            at = col_scale + col.to(tl.int64) * col_major + block.to(tl.int64) * col_minor
            tl.store(at[:, :, None], inverse, mask=((col < cols) & (block * BLOCK < rows))[:, :, None])
    if ALONG_ROWS:
        each = tl.reshape(tl.broadcast_to(by_row[:, :, None], (ROWS, ACROSS, BLOCK)), (ROWS, COLS))
        store_rows(row_codes, encode(widen(tile) * each, E4M3), top, left, rows, cols)
    if ALONG_COLS:
        each = tl.broadcast_to(by_col[:, None, :], (DOWN, BLOCK // 4, COLS))
        words = _words(tile, tl.reshape(each, (ROWS // 4, COLS)), E4M3)
        store_turned(col_codes, words, top, left, col_stride, cols)


@triton.jit
def _store_square(scale, inverse, row, block, major, blocks):
    """Writes the scale of square block [row, block], and the zeros after the row's end, up to ``major`` (fewer than
    four)."""
    after = tl.arange(0, 4)
    col = block + after
    padding = (col >= blocks) & (col < major)
    at = scale + row.to(tl.int64) * major + col
    tl.store(at, tl.where(after == 0, inverse, 0.0), mask=(after == 0) | padding)


@triton.jit
def store_tiled(
    scale, inverse, row, block, major, rows, blocks, FILL: tl.constexpr, REPEAT: tl.constexpr = 1
):
    """Writes one-byte scales of rows and blocks of codes into tiles, each for REPEAT of the tiles' blocks; the padding of
    tiles is FILL (E8M0: 127, 2^0)."""
    row, each = row[:, :, None], block[:, :, None] * REPEAT + tl.arange(0, REPEAT)[None, None, :]
    inside = (row < rows) & (each < blocks)
    padded = (row < tl.cdiv(rows, 128) * 128) & (each < tl.cdiv(blocks, 4) * 4)
    tl.store(scale + tiled_at(row, each, major), tl.where(inside, inverse, FILL).to(tl.uint8), mask=padded)


@triton.jit
def _store_tile(scale, inverse, row, block, major, rows, cols, BLOCK: tl.constexpr):
    """Writes the scale of square block [row, block] of codes [rows, cols] to its tile: 128 rows, four blocks."""
    exponent = tl.broadcast_to(_exponent(inverse, "pow2"), (BLOCK, 1, 1))
    each = (row * BLOCK + tl.arange(0, BLOCK))[:, None]
    store_tiled(scale, exponent, each, block + each * 0, major, rows, tl.cdiv(cols, 32), 127, BLOCK // 32)


@triton.jit
def _exponent(inverse, KIND: tl.constexpr):
    """E8M0 of stored inverses: themselves, or of float32 powers of two (2^-127, a subnormal, has exponent bits of 0)."""
    if KIND == "e8m0":
        return inverse
    else:
        return (as_bits(inverse) >> 23).to(tl.uint8)


@triton.jit
def write_values(
    x, x_stride, first, first_stride, second, offset, rows, cols, values,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes the matrix, [rows, cols] in its dtype."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    down, across = place(cols, COLS)
    top, left = down * ROWS, across * COLS
    store_rows(values, tile, top, left, rows, cols)


@triton.jit
def _amax_bits(
    tile, ALONG_ROWS: tl.constexpr, ALONG_COLS: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    NAN: tl.constexpr,
):  # fmt: skip
    """Largest bits of each 1 x WIDTH block [ROWS, COLS / WIDTH], of each HEIGHT x 1 block [ROWS / HEIGHT, COLS], and of
    the tile, which also stands for one that is not requested. NAN: NaN is above INF (else it is ignored)."""
    if ALONG_ROWS:
        row_bits = row_amax_bits(tile, WIDTH, NAN)
        largest = tl.max(row_bits)
    if ALONG_COLS:
        col_bits = col_amax_bits(tile, HEIGHT, NAN)
        if not ALONG_ROWS:
            largest = tl.max(col_bits)
    if not ALONG_ROWS and not ALONG_COLS:
        largest = tile_amax_bits(tile, NAN)
    if not ALONG_ROWS:
        row_bits = largest
    if not ALONG_COLS:
        col_bits = largest
    return row_bits, col_bits, largest


@triton.jit
def _words(tile, scale, E4M3: tl.constexpr):
    """Codes of a tile with scales that broadcast to [ROWS / 4, COLS], in words of four rows each (tiles.quarters)."""
    a, b, c, d = quarters(tile)
    return encode_word(widen(a) * scale, widen(b) * scale, widen(c) * scale, widen(d) * scale, E4M3)

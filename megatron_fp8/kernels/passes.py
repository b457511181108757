"""The passes over a matrix, as Triton kernels. Each program takes one tile; quantize.py launches them.

The first arguments are a TileSource's (sources.load). row_codes uint8 [rows, cols] and col_codes uint8 [cols, rows] are
contiguous; amaxes are int32 views of float32; a flag says which of them are there. A program's tile is tiles.place.

Amaxes are first taken with NaN included: as bits it is greater than Inf. Only a tile whose largest value is Inf or NaN is
gone through again, to count such elements and to leave NaN out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elements import (
    INF,
    as_bits,
    count_nonfinite,
    divide,
    encode,
    magnitudes,
    narrow,
    record,
    scales,
    without_nan,
)
from .mx_scales import tiled_at
from .sources import load
from .tiles import place, store

# Numbers of an arena lie at any index, on 16 bytes or not: one variant for both.
_NUMBERS = ("given", "amax", "nonfinite", "running")


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def find_amaxes(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_amax, col_amax, amax, nonfinite, running,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, RUNNING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Amaxes of rows [rows], columns [cols] and all, maxed into what is there; that of all into ``running`` too."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    bits = magnitudes(tile)
    row_tops, col_tops, top = _tops(bits, ROWWISE, COLUMNWISE, ROWS, COLS, ROWS, COLS)
    count = tl.zeros_like(top)
    if top >= INF:
        count = count_nonfinite(bits)
        row_tops, col_tops, top = _tops(without_nan(bits), ROWWISE, COLUMNWISE, ROWS, COLS, ROWS, COLS)
    down, across = place(cols, COLS)
    row = (down * ROWS + tl.arange(0, ROWS))[:, None]
    col = (across * COLS + tl.arange(0, COLS))[None, :]
    if ROWWISE:
        tl.atomic_max(row_amax + row, row_tops, mask=row < rows, sem="relaxed")
    if COLUMNWISE:
        tl.atomic_max(col_amax + col, col_tops, mask=col < cols, sem="relaxed")
    if RECORD:
        record(amax, nonfinite, top, count)
    if RUNNING:
        tl.atomic_max(running, top, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def cast_tensor(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_codes, col_codes, given, scale_inv, amax, nonfinite, epsilon, factor,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, E4M3: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One scale: given (KIND 'given'), or of the kind KIND from the amax given."""
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
    codes = encode(tile * scale, E4M3)
    if ROWWISE:
        store(row_codes, codes, top, left, rows, cols)
    if COLUMNWISE:
        store(col_codes, tl.trans(codes), left, top, cols, rows)
    if RECORD:
        bits = magnitudes(tile)
        largest = tl.max(bits)
        count = tl.zeros_like(largest)
        if largest >= INF:
            count = count_nonfinite(bits)
            largest = tl.max(without_nan(bits))
        record(amax, nonfinite, largest, count)


@triton.jit
def cast_rows(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_codes, col_codes, row_amax, col_amax, row_scale, col_scale, epsilon, factor,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    E4M3: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One scale a row for row_codes, one a column for col_codes, from their amaxes."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    down, across = place(cols, COLS)
    top, left = down * ROWS, across * COLS
    if ROWWISE:
        row = top + tl.arange(0, ROWS)
        bits = tl.load(row_amax + row, mask=row < rows, other=0)
        scale, inverse = scales(bits, epsilon, factor, E4M3, KIND)
        if left == 0:
            tl.store(row_scale + row, inverse, mask=row < rows)
        store(row_codes, encode(tile * scale[:, None], E4M3), top, left, rows, cols)
    if COLUMNWISE:
        col = left + tl.arange(0, COLS)
        bits = tl.load(col_amax + col, mask=col < cols, other=0)
        scale, inverse = scales(bits, epsilon, factor, E4M3, KIND)
        if top == 0:
            tl.store(col_scale + col, inverse, mask=col < cols)
        store(col_codes, tl.trans(encode(tile * scale[None, :], E4M3)), left, top, cols, rows)


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def quantize_tiles(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_codes, col_codes, row_scale, row_major, row_minor, col_scale, col_major, col_minor,
    amax, nonfinite, epsilon, factor,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    RECORD: tl.constexpr, E4M3: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, SQUARE: tl.constexpr, TILED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One scale a block, all of whose elements are in this tile. Scales have strides major (rows of codes), minor; with
    TILED they lie as mx_scales.tiled_at has it. Of square blocks a row of scales is ``major`` long: zeros at its end."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    bits = magnitudes(tile)
    ALONG_ROWS: tl.constexpr = ROWWISE and not SQUARE
    ALONG_COLS: tl.constexpr = COLUMNWISE and not SQUARE
    row_tops, col_tops, largest = _tops(bits, ALONG_ROWS, ALONG_COLS, ROWS, COLS, BLOCK, BLOCK)
    count = tl.zeros_like(largest)
    if largest >= INF:
        count = count_nonfinite(bits)
        row_tops, col_tops, largest = _tops(
            without_nan(bits), ALONG_ROWS, ALONG_COLS, ROWS, COLS, BLOCK, BLOCK
        )
    if RECORD:
        record(amax, nonfinite, largest, count)
    DOWN: tl.constexpr = ROWS // BLOCK
    ACROSS: tl.constexpr = COLS // BLOCK
    down, across = place(cols, COLS)
    top, left = down * ROWS, across * COLS
    if SQUARE:
        scale, inverse = scales(largest, epsilon, factor, E4M3, KIND)
        codes = encode(tile * scale, E4M3)
        if ROWWISE:
            _store_square(row_scale, inverse, down, across, row_major, tl.cdiv(cols, BLOCK))
            store(row_codes, codes, top, left, rows, cols)
        if COLUMNWISE:
            _store_square(col_scale, inverse, across, down, col_major, tl.cdiv(rows, BLOCK))
            store(col_codes, tl.trans(codes), left, top, cols, rows)
    if ALONG_ROWS:
        if SOURCE == "plain":  # again, from L1: kept in registers it would halve the programs that fit
            tile = load(
                x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS
            )
        scale, inverse = scales(row_tops, epsilon, factor, E4M3, KIND)
        row = (top + tl.arange(0, ROWS))[:, None]
        block = (across * ACROSS + tl.arange(0, ACROSS))[None, :]
        if TILED:
            _store_tiled(row_scale, inverse, row, block, row_major, rows, tl.cdiv(cols, BLOCK))
        else:
            at = row_scale + row.to(tl.int64) * row_major + block.to(tl.int64) * row_minor
            tl.store(at, inverse, mask=(row < rows) & (block * BLOCK < cols))
        each = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, ACROSS, BLOCK)), (ROWS, COLS))
        codes = encode(tile * each, E4M3)
        store(row_codes, codes, top, left, rows, cols)
    if ALONG_COLS:
        if SOURCE == "plain":
            tile = load(
                x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS
            )
        scale, inverse = scales(col_tops, epsilon, factor, E4M3, KIND)
        col = (left + tl.arange(0, COLS))[None, :]
        block = (down * DOWN + tl.arange(0, DOWN))[:, None]
        if TILED:
            _store_tiled(col_scale, inverse, col, block, col_major, cols, tl.cdiv(rows, BLOCK))
        else:
            at = col_scale + col.to(tl.int64) * col_major + block.to(tl.int64) * col_minor
            tl.store(at, inverse, mask=(col < cols) & (block * BLOCK < rows))
        each = tl.reshape(tl.broadcast_to(scale[:, None, :], (DOWN, BLOCK, COLS)), (ROWS, COLS))
        codes = encode(tile * each, E4M3)
        store(col_codes, tl.trans(codes), left, top, cols, rows)


@triton.jit
def _store_square(scale, inverse, row, block, major, blocks):
    """The scale of square block [row, block]; and zeros from the row's end up to ``major``, fewer than four."""
    after = tl.arange(0, 4)
    col = block + after
    padding = (col >= blocks) & (col < major)
    at = scale + row.to(tl.int64) * major + col
    tl.store(at, tl.where(after == 0, inverse, 0.0), mask=(after == 0) | padding)


@triton.jit
def _store_tiled(scale, inverse, row, block, major, rows, blocks):
    """E8M0 scales of rows and blocks of codes into tiles; 2^0 around the matrix, to the ends of its tiles."""
    inside = (row < rows) & (block < blocks)
    padded = (row < tl.cdiv(rows, 128) * 128) & (block < tl.cdiv(blocks, 4) * 4)
    tl.store(scale + tiled_at(row, block, major), tl.where(inside, inverse, 127).to(tl.uint8), mask=padded)


@triton.jit
def write_values(
    x, x_stride, first, first_stride, second, offset, rows, cols, values,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The matrix itself, [rows, cols] in its dtype."""
    tile = load(x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS)
    down, across = place(cols, COLS)
    top, left = down * ROWS, across * COLS
    store(values, narrow(tile, values.dtype.element_ty), top, left, rows, cols)


@triton.jit
def _tops(
    bits, ALONG_ROWS: tl.constexpr, ALONG_COLS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Largest bits of each 1 x WIDTH block [ROWS, COLS / WIDTH], of each HEIGHT x 1 block [ROWS / HEIGHT, COLS], and of
    all; the last is also returned in place of one that is not wanted."""
    if ALONG_ROWS:
        row_tops = tl.max(tl.reshape(bits, (ROWS, COLS // WIDTH, WIDTH)), 2)
        top = tl.max(row_tops)
    if ALONG_COLS:
        col_tops = tl.max(tl.reshape(bits, (ROWS // HEIGHT, HEIGHT, COLS)), 1)
        if not ALONG_ROWS:
            top = tl.max(col_tops)
    if not ALONG_ROWS and not ALONG_COLS:
        top = tl.max(bits)
    if not ALONG_ROWS:
        row_tops = top
    if not ALONG_COLS:
        col_tops = top
    return row_tops, col_tops, top

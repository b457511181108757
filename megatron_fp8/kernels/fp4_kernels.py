"""NVFP4's passes over a matrix, as Triton kernels; fp4_quantize.py launches them.

The tensor's scale needs the amaxes of all blocks, so a matrix is read twice: for its amax and that of the transformed
columns (``find_fp4_amaxes``; without a transform quantize_kernels.find_amaxes), then for codes and scales of both
directions (``cast_fp4``). Both transform in the tile; the transformed matrix is never written.

A thread has whole 16-row blocks of eight columns (``rows_of(ROWS, 16)``): a column's transform, amax and codes take no
exchange, and a row's block is in two threads. Its eight codes of a row, or of half a column's block, are one word.

For both directions two neighbouring programs read the same tile, and each writes one direction. One program for both
would spill registers. Leading arguments are those of quantize_kernels.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device_math import INF, as_bits, divide, magnitudes, record, widen, without_nan
from .fp4_math import LARGEST, block_scales, columns, hadamard, random_bytes, words_of
from .quantize_kernels import store_tiled
from .tile_amax import nonfinite_in, row_amax_bits, tile_amax_bits
from .tiles import load, place, rows_of


@triton.jit(do_not_specialize_on_alignment=("amax", "turned_amax", "nonfinite", "running"))
def find_fp4_amaxes(
    x, x_stride, first, first_stride, second, offset, rows, cols, amax, turned_amax, nonfinite, running,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, RUNNING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Updates the amaxes of the matrix and of its transformed columns by their maximum; the former also updates
    ``running``."""
    tile = load(
        x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS, 16
    )
    largest = tile_amax_bits(tile, True)
    count = tl.zeros_like(largest)
    if largest >= INF:
        count = nonfinite_in(tile)
        largest = tile_amax_bits(tile, False)
    record(amax, nonfinite, largest, count)
    if RUNNING:
        tl.atomic_max(running, largest, sem="relaxed")
    bits = magnitudes(hadamard(columns(widen(tile))))
    turned = tl.max(bits)
    if turned > INF:
        turned = tl.max(without_nan(bits))
    tl.atomic_max(turned_amax, turned, sem="relaxed")


@triton.jit(
    do_not_specialize=("seed", "site", "iteration", "microbatch"),
    do_not_specialize_on_alignment=("amax", "turned_amax", "used"),
)
def cast_fp4(
    x, x_stride, first, first_stride, second, offset, rows, cols,
    row_codes, row_stride, col_codes, col_stride, row_scale, row_major, col_scale, col_major,
    amax, turned_amax, used, index, index_step, seed, site, iteration, microbatch,
    SOURCE: tl.constexpr, WEIGHTED: tl.constexpr, ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    SQUARE: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr,
    TILED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Writes codes and scales of a tile in one direction. For both directions two programs read the same tile.

    row_codes, col_codes: int32 [rows, row_stride] and [cols, col_stride], eight codes a word. row_scale, col_scale:
    uint8; row_major, col_major: bytes from a row of scales (TILED: of tiles) to the next. used: float32 [2], receives
    both amaxes, 2688 for Inf. index, index_step, seed to microbatch: random_bytes' arguments, if STOCHASTIC.
    """
    SIDES: tl.constexpr = 2 if ROWWISE and COLUMNWISE else 1
    tile = load(
        x, x_stride, first, first_stride, second, offset, rows, cols, SOURCE, WEIGHTED, ROWS, COLS, 16, SIDES
    )
    down, across = place(cols, COLS, SIDES)
    own, turned_own = _finite(tl.load(amax)), _finite(tl.load(turned_amax))
    if tl.program_id(0) == 0:
        tl.store(used, own)
        tl.store(used + 1, turned_own)
    turn = tl.program_id(0) % SIDES
    if ROWWISE:  # noqa: SIM102  joined with ``turn``, the other direction would be compiled too
        if turn == 0:
            _cast_rows(
                tile, own, row_codes, row_stride, row_scale, row_major, down, across, rows, cols,
                index, index_step, seed, site, iteration, microbatch, SQUARE, STOCHASTIC, ALIGNED, TILED,
            )  # fmt: skip
    if COLUMNWISE:  # noqa: SIM102
        if turn == SIDES - 1:
            _cast_columns(
                tile, turned_own, col_codes, col_stride, col_scale, col_major, down, across, rows, cols,
                index, index_step, seed, site if SQUARE else ~site, iteration, microbatch,
                SQUARE, HADAMARD, STOCHASTIC, ALIGNED, TILED,
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=("a", "b"))
def find_factor(a, b, factors):
    """Writes the factor of a product from its operands' amaxes (float32 [] each), and 1 after it."""
    tl.store(factors, divide(tl.load(a) * tl.load(b), LARGEST * LARGEST))
    tl.store(factors + 1, 1.0)


@triton.jit
def _cast_rows(
    tile, amax, codes, stride, scale, major, down, across, rows, cols,
    index, index_step, seed, site, iteration, microbatch,
    SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Blocks along the rows."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    A: tl.constexpr = ROWS // 16
    B: tl.constexpr = COLS // 16
    bits = row_amax_bits(tile, 16, True)
    if tl.max(bits) > INF:
        tile = tl.where(magnitudes(widen(tile)) > INF, tl.zeros_like(tile), tile)
        bits = row_amax_bits(tile, 16, True)
    if SQUARE:
        bits = tl.max(tl.reshape(bits, (16, A, B)), 0)
    code, factor = block_scales(bits, amax)
    if SQUARE:
        code = tl.reshape(tl.broadcast_to(code[None, :, :], (16, A, B)), (ROWS, B))
        factor = tl.reshape(tl.broadcast_to(factor[None, :, :], (16, A, B)), (ROWS, B))
    row, block = (down * ROWS + rows_of(ROWS, 16))[:, None], (across * B + tl.arange(0, B))[None, :]
    _store_scales(scale, code, row, block, major, rows, cols, SQUARE, TILED)
    each = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, B, 16)), (ROWS, COLS))
    drawn = 0
    if STOCHASTIC:
        drawn = random_bytes(
            index, index_step, seed, site, iteration, microbatch, down, across, ALIGNED, ROWS, COLS
        )
        drawn = tl.reshape(drawn, (ROWS, COLS // 8, 8))
    words = words_of(tl.reshape(widen(tile) * each, (ROWS, COLS // 8, 8)), drawn, STOCHASTIC)
    word = (across * (COLS // 8) + tl.arange(0, COLS // 8))[None, :]
    tl.store(codes + row.to(tl.int64) * stride + word, words, mask=(row < rows) & (word < stride))


@triton.jit
def _cast_columns(
    tile, amax, codes, stride, scale, major, down, across, rows, cols,
    index, index_step, seed, site, iteration, microbatch,
    SQUARE: tl.constexpr, HADAMARD: tl.constexpr, STOCHASTIC: tl.constexpr, ALIGNED: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Blocks along the columns, which are written as rows."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    A: tl.constexpr = ROWS // 16
    B: tl.constexpr = COLS // 16
    turned = columns(widen(tile))
    if HADAMARD:
        turned = hadamard(turned)
    bits = tl.max(magnitudes(turned), 2)
    if tl.max(bits) > INF:
        turned = tl.where(turned == turned, turned, 0.0)
        bits = tl.max(magnitudes(turned), 2)
    if SQUARE:
        bits = tl.max(tl.reshape(bits, (A, B, 16)), 2)
    code, factor = block_scales(bits, amax)
    if SQUARE:
        code = tl.reshape(tl.broadcast_to(code[:, :, None], (A, B, 16)), (A, COLS))
        factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (A, B, 16)), (A, COLS))
    col, block = across * COLS + tl.arange(0, COLS), (down * A + tl.arange(0, A))[:, None]
    _store_scales(scale, code, col[None, :], block, major, cols, rows, SQUARE, TILED)
    drawn = 0
    if STOCHASTIC:
        drawn = random_bytes(
            index, index_step, seed, site, iteration, microbatch, down, across, ALIGNED, ROWS, COLS
        )
        drawn = tl.reshape(columns(drawn), (A, 2 * COLS, 8))
    words = words_of(tl.reshape(turned * factor[:, :, None], (A, 2 * COLS, 8)), drawn, STOCHASTIC)
    words = tl.reshape(tl.permute(tl.reshape(words, (A, COLS, 2)), (1, 0, 2)), (COLS, 2 * A))
    col, word = col[:, None], (down * 2 * A + tl.arange(0, 2 * A))[None, :]
    tl.store(codes + col.to(tl.int64) * stride + word, words, mask=(col < cols) & (word < stride))


@triton.jit
def _finite(amax):
    """float32 amax, and 2688 in place of Inf."""
    return tl.where(as_bits(amax) == INF, LARGEST, amax)


@triton.jit
def _store_scales(
    scale, code, row, block, major, rows, cols, SQUARE: tl.constexpr, TILED: tl.constexpr
):  # fmt: skip
    """Writes E4M3 scales of rows and blocks of codes [rows, cols]: in tiles, or one a block (SQUARE: of 16 rows)."""
    blocks = tl.cdiv(cols, 16)
    if TILED:
        store_tiled(scale, code[:, :, None], row, block, major, rows, blocks, 0)
    elif SQUARE:
        at = scale + (row // 16).to(tl.int64) * major + block
        tl.store(at, code, mask=(row < rows) & (row % 16 == 0) & (block < blocks))
    else:
        at = scale + row.to(tl.int64) * major + block
        tl.store(at, code, mask=(row < rows) & (block < blocks))

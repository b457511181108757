"""Tiling of matrices, and writing of codes, for all quantisation kernels.

Codes of the columnwise side are written transposed, [cols, rows] and contiguous, as Hopper's FP8 GEMM reads them. A
tile is turned on chip, and is at least 64 rows high, so that each of its columns is written as whole 32-byte sectors.

Bytes are dear to turn: alone each is an access to shared memory. So four rows that follow each other in the matrix lie a
quarter of the tile apart in it (``rows_of``), which gives them to one thread; it makes their four codes of a column one
word, and words are turned.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..numerics.formats import E4M3, FloatFormat


class Tile(NamedTuple):
    """How much one program takes: rows x cols of the matrix, by ``warps`` warps of at most ``registers`` a thread."""

    rows: int
    cols: int
    warps: int
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """The launch's keywords; float contraction is off, so that results do not depend on Triton's default."""
        return _options(self)


@lru_cache(maxsize=64)
def _options(tile: Tile) -> dict[str, Any]:
    limit = {} if tile.registers is None else {"maxnreg": tile.registers}
    return {"ROWS": tile.rows, "COLS": tile.cols, "num_warps": tile.warps, "enable_fp_fusion": False} | limit


def grid_of(rows: int, cols: int, tile: Tile) -> tuple[int]:
    """One program for each tile (``place``), all on the first axis: the others hold 65,535 programs at most."""
    return (max(-(-rows // tile.rows), 1) * max(-(-cols // tile.cols), 1),)  # triton.cdiv takes 2 us


def is_e4m3(fmt: FloatFormat) -> bool:
    """The kernels' E4M3 flag; they know E4M3 and E5M2."""
    assert fmt.signed, "E8M0 is a scale format"
    return fmt is E4M3


def codes_like(rows: int, cols: int, fmt: FloatFormat, device: torch.device) -> torch.Tensor:
    """Uninitialised codes [rows, cols] of fmt.dtype."""
    return torch.empty(rows, cols, dtype=fmt.dtype, device=device)


@triton.jit
def place(cols, COLS: tl.constexpr):
    """(row of tiles, column of tiles) of this program. Columns are fastest: what is read twice is still in L2."""
    across = (cols - 1) // COLS + 1  # 1 of no columns: the quotient is cut off towards zero
    return tl.program_id(0) // across, tl.program_id(0) % across


@triton.jit
def rows_of(ROWS: tl.constexpr):
    """int32 [ROWS]: which row of the matrix, from the tile's first on, lies where in a tile: 0, 4, 8 ... 1, 5, 9 ..."""
    at = tl.arange(0, ROWS)
    return at % (ROWS // 4) * 4 + at // (ROWS // 4)


@triton.jit
def quarters(tile):
    """A tile [ROWS, COLS], its rows as ``rows_of``, as four [ROWS / 4, COLS]: of rows 4 r, 4 r + 1, 4 r + 2, 4 r + 3."""
    ROWS: tl.constexpr = tile.shape[0] // 4
    COLS: tl.constexpr = tile.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(tile, (2, 2, ROWS, COLS)), (2, 3, 0, 1)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def store_turned(out, words, top, left, rows, cols):
    """Words of ``quarters``' codes, [ROWS / 4, COLS], to the tile at [left, top] of ``out`` [cols, rows], contiguous;
    rows may be more than the matrix has, within the last tile."""
    ROWS: tl.constexpr = 4 * words.shape[0]
    COLS: tl.constexpr = words.shape[1]
    turned = tl.trans(words)
    four = tl.arange(0, 4)[None, None, :]
    codes = tl.reshape((turned[:, :, None] >> (8 * four)) & 0xFF, (COLS, ROWS)).to(tl.uint8)
    store(out, codes, left, top, cols, rows)


@triton.jit
def store_rows(out, tile, top, left, rows, cols):
    """A tile with its rows as ``rows_of`` to ``out`` [rows, cols], contiguous, with its corner at [top, left]."""
    store(out, tile, top, left, rows, cols, rows_of(tile.shape[0]))


@triton.jit
def store(out, tile, top, left, rows, cols, down=None):
    """A tile to ``out`` [rows, cols], contiguous, with its corner at [top, left]; its rows are ``down`` or in order."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    if down is None:
        down = tl.arange(0, ROWS)
    across = tl.arange(0, COLS)
    inside = (top + down < rows)[:, None] & (left + across < cols)[None, :]
    at = (out + top.to(tl.int64) * cols + left) + (down[:, None] * cols + across[None, :])
    tl.store(at, tile, mask=inside)

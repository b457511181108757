"""FP8 casts of float32 master weight shards, for the distributed optimizer.

A rank owns the elements offset .. offset + n of the flattened weight [rows, cols]. Both passes round them to the model's
dtype while reading, so no rounded copy is written. Tiles and blocks are those of the whole matrix, masked to the shard.
Between the passes ranks max-reduce the amaxes (params/shards.py explains why this gives the codes of the whole weight).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..numerics.formats import FloatFormat
from . import on_its_device
from .device_math import INF, count_nonfinite, encode, magnitudes, narrow, record, widen, without_nan
from .tiles import Tile, grid_of, is_e4m3, place

SIDE = 128
"""Rows and columns of a tile, equal to the square block of blockwise weights."""
_TILE = Tile(SIDE, SIDE, 8)
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@on_its_device
def piece_amax(
    master: torch.Tensor,
    offset: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    amax: torch.Tensor,
    nonfinite: torch.Tensor,
) -> None:
    """Updates ``amax`` by a shard's amaxes and adds its count of NaN and Inf to ``nonfinite``.

    Args:
        master: float32 [n], contiguous.
        offset: its start in the flattened weight.
        shape: [rows, cols] of the whole weight.
        dtype: the model's; elements are rounded to it first.
        amax: float32, contiguous, >= 0: [] for one scale per tensor, [ceil(rows / 128), ceil(cols / 128)] for square
            blocks.
        nonfinite: float32 [].
    """
    if master.numel():
        grid, first = _grid(master, offset, shape)
        _piece_amax[grid](
            master, offset, shape[1], master.numel(), first, amax.view(torch.int32), nonfinite,
            DTYPE=_DTYPES[dtype], PER_BLOCK=_per_block(amax, shape), SIDE=SIDE, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


@on_its_device
def piece_cast(
    master: torch.Tensor,
    offset: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    scale: torch.Tensor,
    codes: torch.Tensor,
    fmt: FloatFormat,
) -> None:
    """Writes a shard's codes with the whole weight's scales.

    Args:
        master, offset, shape, dtype: as in piece_amax.
        scale: float32, contiguous, shaped as piece_amax's amax.
        codes: fmt.dtype or uint8 [n], contiguous; the output.
    """
    if master.numel():
        grid, first = _grid(master, offset, shape)
        _piece_cast[grid](
            master, offset, shape[1], master.numel(), first, scale, codes.view(torch.uint8),
            DTYPE=_DTYPES[dtype], E4M3=is_e4m3(fmt), PER_BLOCK=_per_block(scale, shape), SIDE=SIDE,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def _grid(master: torch.Tensor, offset: int, shape: tuple[int, int]) -> tuple[tuple[int], int]:
    """(grid, first row of tiles) of the rows of tiles that overlap the shard."""
    assert master.is_contiguous() and master.dtype == torch.float32, "a flat float32 piece"
    rows, cols = shape
    assert offset >= 0 and offset + master.numel() <= rows * cols, "the piece lies inside the weight"
    assert cols < 1 << 24, "offsets inside a tile are 32-bit numbers"
    first = offset // cols // SIDE
    last = (offset + master.numel() - 1) // cols // SIDE
    return grid_of((last - first + 1) * SIDE, cols, _TILE), first


def _per_block(per_block: torch.Tensor, shape: tuple[int, int]) -> bool:
    blocks = (triton.cdiv(shape[0], SIDE), triton.cdiv(shape[1], SIDE))
    assert per_block.is_contiguous() and (per_block.ndim == 0 or per_block.shape == blocks), (
        "[] or one a block"
    )
    return per_block.ndim > 0


@triton.jit
def _place(offset, cols, n, first, SIDE: tl.constexpr):
    """(offset of this tile's corner in the shard, element offsets from it, mask of the shard, the block's index)."""
    down, across_tile = place(cols, SIDE)
    tile_row = first + down
    corner = tile_row.to(tl.int64) * SIDE * cols + across_tile * SIDE - offset
    across = tl.arange(0, SIDE)[None, :]
    away = tl.arange(0, SIDE)[:, None] * cols + across
    held = (across_tile * SIDE + across < cols) & (corner + away >= 0) & (corner + away < n)
    return corner, away, held, tile_row * ((cols - 1) // SIDE + 1) + across_tile


@triton.jit
def _piece_amax(
    master, offset, cols, n, first, amax, nonfinite,
    DTYPE: tl.constexpr, PER_BLOCK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    corner, away, held, number = _place(offset, cols, n, first, SIDE)
    value = tl.load((master + corner) + away, mask=held, other=0.0)
    bits = magnitudes(widen(narrow(value, DTYPE)))
    top = tl.max(bits)
    count = tl.zeros_like(top)
    if top >= INF:
        count = count_nonfinite(bits)
        top = tl.max(without_nan(bits))
    record(amax + (number if PER_BLOCK else 0), nonfinite, top, count)


@triton.jit
def _piece_cast(
    master, offset, cols, n, first, scale, codes,
    DTYPE: tl.constexpr, E4M3: tl.constexpr, PER_BLOCK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    corner, away, held, number = _place(offset, cols, n, first, SIDE)
    value = tl.load((master + corner) + away, mask=held, other=0.0)
    product = widen(narrow(value, DTYPE)) * tl.load(scale + (number if PER_BLOCK else 0))
    tl.store((codes + corner) + away, encode(product, E4M3), mask=held)

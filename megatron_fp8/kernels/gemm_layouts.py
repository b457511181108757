"""Codes and MX scales laid out as GEMMs read them: transposed, and in tiles.

Codes are transposed for gathered shards and parameters needed in the other direction:
torch's copy of a transposed byte matrix writes single bytes. This kernel transposes each tile on chip and reads and
writes whole sectors.

A tile of E8M0 scales holds 128 rows by 4 blocks, 512 bytes. Scale (i, j) is at byte
((i // 128) * tiles_across + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4. Padding is 2^0: a NaN there
would be multiplied by zero codes. A scale of a 128-wide block counts for four 1x32 blocks. The cast of a linear's operand
writes this layout directly (quantize_kernels.quantize_tiles, ``tiled_at``). ``tile_scales`` converts all others: gathered
shards and FP8 parameters.

Source: NVIDIA cuBLAS documentation, "Scaling factors layouts".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device
from .device_math import INF, as_bits
from .tiles import Tile, grid_of, place, store

TILE = Tile(128, 128, 8)


@on_its_device
def transpose(codes: torch.Tensor, *, tile: Tile = TILE) -> torch.Tensor:
    """Contiguous transpose [cols, rows] of codes [rows, cols], any one-byte dtype. Rows may be strided; may be empty.

    Raises:
        ValueError: codes is not a matrix of bytes.
    """
    if codes.ndim != 2 or codes.element_size() != 1:
        raise ValueError(
            f"transpose takes a matrix of one-byte codes, got {codes.dtype} {tuple(codes.shape)}: quantize it first"
        )
    if codes.stride(1) != 1:
        codes = codes.contiguous()
    rows, cols = codes.shape
    out = torch.empty(cols, rows, dtype=codes.dtype, device=codes.device)
    if codes.numel():
        _transpose[grid_of(rows, cols, tile)](
            codes.view(torch.uint8), codes.stride(0), out.view(torch.uint8), rows, cols, **tile.options()
        )
    return out


@triton.jit
def _transpose(codes, stride, out, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    down_tile, across_tile = place(cols, COLS)
    top, left = down_tile * ROWS, across_tile * COLS
    down, across = tl.arange(0, ROWS), tl.arange(0, COLS)
    inside = (top + down < rows)[:, None] & (left + across < cols)[None, :]
    at = (codes + top.to(tl.int64) * stride + left) + (down[:, None] * stride + across[None, :])
    store(out, tl.trans(tl.load(at, mask=inside, other=0)), left, top, cols, rows)


WIDTH = 32
"""Columns of an MX block."""
_PROGRAM = 4096


def tiled_size(rows: int, cols: int, width: int = WIDTH) -> int:
    """Bytes of the tiled scales of codes [rows, cols], one for 1 x width."""
    return -(-rows // 128) * -(-cols // (4 * width)) * 512  # triton.cdiv takes 2 us


@on_its_device
def tile_scales(
    scale: torch.Tensor,
    rows: int,
    cols: int,
    *,
    height: int = 1,
    width: int = WIDTH,
    unit: int = WIDTH,
    fill: int = 127,
) -> torch.Tensor:
    """Tiled scales [tiled_size], float8_e8m0fnu or scale's, of codes [rows, cols] with one scale_inv per height x width
    block.

    Args:
        scale: [ceil(rows / height), ceil(cols / width)], any strides; one byte each, or float32 powers of two from
            2^-127 to 2^127, a wider range than specified scales have (NaN and Inf become NaN).
        width: a multiple of unit, the columns of one scale in the tiles.
        fill: the padding's byte.
    """
    assert scale.shape == (triton.cdiv(rows, height), triton.cdiv(cols, width)), "one scale a block"
    assert width % unit == 0, "whole blocks share a scale"
    exponents = scale.dtype != torch.float32
    out = torch.empty(tiled_size(rows, cols, unit), dtype=torch.uint8, device=scale.device)
    if out.numel():
        _tile_scales[(triton.cdiv(out.numel(), _PROGRAM),)](
            scale.view(torch.uint8) if exponents else scale,
            *scale.stride(),
            out,
            out.numel(),
            rows,
            triton.cdiv(cols, unit),
            EXPONENTS=exponents,
            HEIGHT=height,
            REPEAT=width // unit,
            FILL=fill,
            SIZE=_PROGRAM,
            num_warps=4,
        )
    return out.view(scale.dtype if exponents else torch.float8_e8m0fnu)


@triton.jit
def tiled_at(row, block, major):
    """Byte offset of the scale of (row, block) of the codes; ``major``: bytes per row of tiles."""
    inside = (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
    return (row // 128).to(tl.int64) * major + ((block // 4) * 512 + inside)


@triton.jit
def _tile_scales(
    scale, major, minor, out, size, rows, blocks,
    EXPONENTS: tl.constexpr, HEIGHT: tl.constexpr, REPEAT: tl.constexpr, FILL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    across = (blocks + 3) // 4
    tile, inside = at // 512, (at % 512).to(tl.int32)
    row = tile // across * 128 + (inside // 4 % 4 * 32 + inside // 16)
    block = tile % across * 4 + inside % 4
    known = (at < size) & (row < rows) & (block < blocks)
    stored = tl.load(scale + row // HEIGHT * major + block // REPEAT * minor, mask=known, other=0)
    if EXPONENTS:
        exponent = stored
    else:
        # Exponent bits of 2^-127, a subnormal float32, and of 0 are E8M0's 2^-127; those of Inf and NaN are its NaN.
        exponent = ((as_bits(stored) & INF) >> 23).to(tl.uint8)
    tl.store(out + at, tl.where(known, exponent, FILL).to(tl.uint8), mask=at < size)

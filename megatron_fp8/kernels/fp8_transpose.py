"""Transposition of codes: gathered shards and parameters needed in the other direction.

torch's copy of a transposed byte matrix writes single bytes. This kernel transposes each tile on chip and reads and
writes whole sectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import on_its_device
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
            f"transpose takes a matrix of one-byte codes, got {codes.dtype} {tuple(codes.shape)}: quantise it first"
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

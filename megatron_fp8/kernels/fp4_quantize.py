"""NVFP4 quantization on a GPU: two passes over a matrix.

``find_amaxes`` reads it for the tensor's amaxes, which ranks may reduce; ``cast`` for codes and scales, both directions.
Bits are those of backends/fp4.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..numerics.cast import RandomKey
from ..numerics.formats import E2M1
from ..numerics.rule import Direction
from . import zero_pool
from .fp4_kernels import cast_fp4, find_factor, find_fp4_amaxes
from .gemm_layouts import tiled_size
from .launch_cache import launch
from .quantize import Record, measure, round_up
from .tiles import StoredMatrix, Tile, TileSource, grid_of

TILE = Tile(128, 128, 4)
"""A thread has 16 rows of eight columns. Whole tiles of scales, in both directions."""
_BLOCK = 16


class Draws(NamedTuple):
    """Random bytes of stochastic rounding. first: the logical index of the matrix's first element. step: the
    distance between the indices of two rows (backends/base.py's Region)."""

    key: RandomKey
    first: int
    step: int


class Side(NamedTuple):
    """One direction: codes float4_e2m1fn_x2 [R, C / 2], C in whole blocks; scales float8_e4m3fn [R, ceil(C / 16)] (square
    blocks: [ceil(R / 16), ceil(C / 16)]) or in tiles (gemm_layouts.py); amax float32 [], 2688 for Inf."""

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor


def find_amaxes(
    x: torch.Tensor | TileSource,
    *,
    transformed: bool,
    nonfinite: torch.Tensor | None = None,
    running: torch.Tensor | None = None,
    tile: Tile = TILE,
) -> torch.Tensor:
    """float32 [1]: the amax of x [rows, cols]; [2] if its columns are ``transformed`` (the random Hadamard transform):
    theirs too.

    nonfinite (float32 []) is increased by the number of NaN and Inf, running (float32 []) updated by x's amax.
    """
    source = x if isinstance(x, TileSource) else StoredMatrix(x)
    found = zero_pool.take(source.device)
    count = torch.zeros_like(found[0]) if nonfinite is None else nonfinite
    if not transformed:
        measure(source, record=Record(found[0], count, running))
        return found[:1]
    if source.rows and source.cols:
        launch(
            find_fp4_amaxes,
            source.grid(tile),
            **source.arguments(),
            amax=found.view(torch.int32)[0],
            turned_amax=found.view(torch.int32)[1],
            nonfinite=count,
            running=None if running is None else running.view(torch.int32),
            RUNNING=running is not None,
            **tile.options(),
        )
    return found


def cast(
    x: torch.Tensor | TileSource,
    direction: Direction,
    amaxes: torch.Tensor,
    *,
    square: bool = False,
    transformed: bool = False,
    draws: Draws | None = None,
    tiled: bool = False,
    pad_to: int = _BLOCK,
    room: int = 1,
    tile: Tile = TILE,
) -> tuple[Side | None, Side | None]:
    """Rowwise and columnwise codes and scales of x [rows, cols].

    Args:
        amaxes: ``find_amaxes``', reduced or not.
        square: blocks of 16x16, else 1x16 in each direction.
        transformed: the columnwise side is that of the matrix after the transform.
        draws: for stochastic rounding.
        tiled: scales in the GEMM's tiles.
        pad_to: codes reach to a multiple of it along the contraction; 16 or a multiple.
        room: allocate codes for rows up to a multiple of it; the extra rows are not written.
    """
    source = x if isinstance(x, TileSource) else StoredMatrix(x)
    rows, cols = source.rows, source.cols
    used = torch.empty(2, dtype=torch.float32, device=source.device)
    rowwise = columnwise = None
    if direction != "columnwise":
        rowwise = _empty(rows, cols, used[0], square, tiled, pad_to, room)
    if direction != "rowwise":
        columnwise = _empty(cols, rows, used[1], square, tiled, pad_to, room)
    if rows and cols:
        key = RandomKey(0) if draws is None else draws.key
        # A tile of scales is 128 rows high: extra programs fill the padding.
        high, wide = (round_up(rows, 128), round_up(cols, 128)) if tiled else (rows, cols)
        (programs,) = grid_of(high, wide, tile)
        shared = {
            **source.arguments(),
            "amax": amaxes[0],
            "turned_amax": amaxes[-1],
            "used": used,
            "index": 0 if draws is None else draws.first,
            "index_step": 0 if draws is None else draws.step,
            **{name: _as_int32(getattr(key, name)) for name in ("seed", "site", "iteration", "microbatch")},
            "SQUARE": square,
            "HADAMARD": transformed,
            "STOCHASTIC": draws is not None,
            "ALIGNED": draws is None or draws.first % _BLOCK == draws.step % _BLOCK == 0,
            "TILED": tiled,
            **tile.options(),
        }
        # A kernel that draws for both directions would need more registers than a thread has.
        launches = [(rowwise, columnwise)] if draws is None else [(rowwise, None), (None, columnwise)]
        for row, column in launches:
            if row or column:
                grid = (programs * (2 if row and column else 1),)
                launch(cast_fp4, grid, **shared, **_arguments("row", row), **_arguments("col", column))
    else:
        used.zero_()
    return rowwise, columnwise


def product_factor(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32 [2]: the factor of a product of tensors with amaxes a and b (float32 [] each), as
    backends/fp4.py's ``tensor_factor``; and 1."""
    factors = torch.empty(2, dtype=torch.float32, device=a.device)
    launch(find_factor, (1,), a=a, b=b, factors=factors, num_warps=1, enable_fp_fusion=False)
    return factors


def _empty(
    rows: int, cols: int, amax: torch.Tensor, square: bool, tiled: bool, pad_to: int, room: int
) -> Side:
    """An unwritten side of codes [rows, cols]."""
    device, blocks = amax.device, -(-cols // _BLOCK)
    codes = torch.empty(round_up(rows, room), round_up(cols, pad_to) // 2, dtype=torch.uint8, device=device)
    shape = (-(-rows // _BLOCK) if square else rows, blocks)
    scales = torch.empty(tiled_size(rows, cols, _BLOCK) if tiled else shape, dtype=torch.uint8, device=device)
    return Side(codes[:rows].view(E2M1.dtype), scales.view(torch.float8_e4m3fn), amax)


def _arguments(name: str, side: Side | None) -> dict[str, Any]:
    """A direction's arguments of ``cast_fp4``; {name}wise: whether it is written."""
    names, flag = [f"{name}_{each}" for each in ("codes", "stride", "scale", "major")], _FLAGS[name]
    if side is None:
        return dict(zip(names, (None, 0, None, 0), strict=True)) | {flag: False}
    codes, scales = side.codes.view(torch.int32), side.scales.view(torch.uint8)
    major = scales.stride(0) if scales.ndim == 2 else tiled_size(1, 8 * codes.shape[1], _BLOCK)
    return dict(zip(names, (codes, codes.shape[1], scales, major), strict=True)) | {flag: True}


_FLAGS = {"row": "ROWWISE", "col": "COLUMNWISE"}


def _as_int32(number: int) -> int:
    """number mod 2^32 as a signed number: Triton compiles one variant for all."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)

"""Quantization kernels: one read per reduction, and both directions are written.

| recipe | passes over the matrix | functions |
|---|---|---|
| delayed | one: cast under the given scale and record the amax | quantize_tensor(scale=) |
| tensorwise | two: the scale needs the amax first | measure, quantize_tensor(amax=) |
| rowwise | two: row and column amaxes in one read, then casts | measure, quantize_rows |
| blockwise, MXFP8 | one: blocks of both directions are inside the tile | quantize_blocks |

Every function takes a matrix x [rows, cols] (float32, bfloat16 or float16; rows may be strided; may be empty) or a
TileSource that computes one, and returns ``Sides``: codes and inverse scales of the requested directions. Columnwise
codes are [cols, rows], contiguous; ``pad_to``, a divisor of the tile's rows, rounds that number of rows up to a multiple
and fills the padding with zeros. Scales are not padded. NaN becomes 0x7F, Inf saturates, and neither makes a scale
non-finite; the ``Record`` counts both and holds the amax over all elements that are not NaN. Codes, scales and records
equal the emulated backend's.

Tiles are fixed, not autotuned. An autotuner would run at the first call of every shape, cannot run inside a captured
graph, and gains little where memory bandwidth is the limit. The tiles were chosen from the code compiled for an H100
(benchmarks/instructions.py): transposed rows of 64 to 128 bytes are whole sectors, each thread accesses 16 bytes at once,
no registers spill, and at least two programs fit on a multiprocessor, so one loads while another computes. A thread has
64 values, which amortises per-thread work and gives it all rows that share a word (tiles.rows_of). ``tile=`` is for
experiments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..numerics.formats import FloatFormat
from ..numerics.rule import Direction, ScaleKind
from .device_math import kind_for
from .fused_quantize import Swiglu, SwigluGradient
from .gemm_layouts import tiled_size
from .launch_cache import launch
from .quantize_kernels import (
    cast_rows,
    cast_tensor,
    find_amaxes,
    find_gradient_amaxes,
    quantize_tiles,
    write_values,
)
from .tiles import StoredMatrix, Tile, TileSource, codes_like, grid_of, is_e4m3

TENSOR_TILE = Tile(128, 64, 4)
BLOCK_TILE = Tile(128, 128, 8, registers=128)
SQUARE_TILE = Tile(128, 128, 8)
MX_TILE = Tile(64, 128, 4)
# Computed sources need more registers and are expensive to compute twice.
SWIGLU_TILE = Tile(128, 64, 4)
COMPUTED_BLOCK_TILE = Tile(128, 128, 8, registers=128)


class Side(NamedTuple):
    """One direction: codes of fmt.dtype, contraction dimension last; scale_inv as the function documents."""

    codes: torch.Tensor
    scale_inv: torch.Tensor


class Sides(NamedTuple):
    """The requested directions; the other one is None."""

    rowwise: Side | None
    columnwise: Side | None


@dataclass(frozen=True)
class Record:
    """Amax (updated by max) and count of NaN and Inf (added) of a cast: float32 [] each.

    Views of an arena's slot, or ``Record.new``. Counts are exact up to 2^24. ``measure`` also updates ``running``
    (float32 []) by the amax; a scale is computed from one matrix's amax alone.
    """

    amax: torch.Tensor
    nonfinite: torch.Tensor
    running: torch.Tensor | None = None

    @classmethod
    def new(cls, device: torch.device) -> Record:
        """An empty record."""
        pair = torch.zeros(2, device=device, dtype=torch.float32)
        return cls(pair[0], pair[1])


def measure(
    x: torch.Tensor | TileSource,
    *,
    rows: bool = False,
    cols: bool = False,
    record: Record | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Amaxes of x [rows, cols] in one read: (per row, float32 [rows]; per column, float32 [cols]).

    The amax of the whole matrix goes into ``record``.
    """
    source = _source(x)
    tile = tile or _tile(source)
    device = source.device
    # One fill for both; the columns' part is 16-byte aligned, as a separate allocation would be.
    start = round_up(source.rows, 4) if rows else 0
    amaxes = (
        torch.zeros(start + source.cols * cols, device=device, dtype=torch.float32) if rows or cols else None
    )
    row_amax = amaxes[: source.rows] if amaxes is not None and rows else None
    col_amax = amaxes[start:] if amaxes is not None and cols else None
    wanted = {
        "row_amax": _as_int(row_amax),
        "col_amax": _as_int(col_amax),
        **_record_arguments(record),
        "running": None if record is None else _as_int(record.running),
        "RUNNING": record is not None and record.running is not None,
        "ROWWISE": rows,
        "COLUMNWISE": cols,
        **tile.options(),
    }
    if source.rows and source.cols:
        if isinstance(source, SwigluGradient):
            half = source.cols // 2
            launch(find_gradient_amaxes, grid_of(source.rows, half, tile), **source.halves(), **wanted)
        else:
            launch(find_amaxes, source.grid(tile), **source.arguments(), **wanted)
    return row_amax, col_amax


def quantize_tensor(
    x: torch.Tensor | TileSource,
    fmt: FloatFormat,
    direction: Direction = "both",
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    pow2: bool = False,
    margin: int = 0,
    epsilon: float = 0.0,
    pad_to: int = 1,
    record: Record | None = None,
    tile: Tile | None = None,
) -> Sides:
    """Quantize x [rows, cols] with one scale: given (delayed), or computed from ``measure``'s ``amax`` (tensorwise).

    Args:
        scale, amax: float32 []; exactly one of them. With ``scale``, pow2, margin and epsilon are ignored.
        record: receives amax and non-finite count; None records nothing.

    Returns:
        Sides; scale_inv is float32 [], the same tensor in both.
    """
    assert (scale is None) != (amax is None), "either the scale or the amax that it is made from"
    source = _source(x)
    tile = tile or _tile(source)
    out = _Outputs(source, fmt, direction, tile, pad_to)
    scale_inv = torch.empty((), device=source.device, dtype=torch.float32)
    # The first program writes scale_inv, so an empty matrix needs one too; all its elements are masked.
    launch(
        cast_tensor,
        source.grid(tile),
        **source.arguments(),
        **out.arguments(),
        given=scale if scale is not None else amax,
        scale_inv=scale_inv,
        **_record_arguments(record),
        epsilon=epsilon,
        factor=2.0**-margin,
        E4M3=is_e4m3(fmt),
        KIND="given" if scale is not None else kind_for("pow2" if pow2 else "fp32", margin),
        **tile.options(),
    )
    return out.sides(scale_inv, scale_inv)


def quantize_rows(
    x: torch.Tensor | TileSource,
    fmt: FloatFormat,
    row_amax: torch.Tensor | None,
    col_amax: torch.Tensor | None,
    *,
    pow2: bool = True,
    margin: int = 0,
    epsilon: float = 0.0,
    pad_to: int = 1,
    tile: Tile | None = None,
) -> Sides:
    """Quantize x [rows, cols] with one scale per row of each direction, from ``measure``'s amaxes (reduced or not).

    Args:
        row_amax, col_amax: float32 [rows] and [cols]; None skips that direction.

    Returns:
        Sides; scale_inv float32 [rows, 1] and [cols, 1].
    """
    source = _source(x)
    tile = tile or _tile(source)
    direction: Direction = "columnwise" if row_amax is None else "rowwise" if col_amax is None else "both"
    out = _Outputs(source, fmt, direction, tile, pad_to)
    device = source.device
    row_scale = None if row_amax is None else torch.empty(source.rows, 1, device=device, dtype=torch.float32)
    col_scale = None if col_amax is None else torch.empty(source.cols, 1, device=device, dtype=torch.float32)
    # An empty matrix may still have row or column scales to write.
    launch(
        cast_rows,
        source.grid(tile),
        **source.arguments(),
        **out.arguments(),
        row_amax=_as_int(row_amax),
        col_amax=_as_int(col_amax),
        row_scale=row_scale,
        col_scale=col_scale,
        epsilon=epsilon,
        factor=2.0**-margin,
        E4M3=is_e4m3(fmt),
        KIND=kind_for("pow2" if pow2 else "fp32", margin),
        **tile.options(),
    )
    return out.sides(row_scale, col_scale)


def quantize_blocks(
    x: torch.Tensor | TileSource,
    fmt: FloatFormat,
    direction: Direction = "both",
    *,
    block: int,
    square: bool = False,
    kind: ScaleKind = "pow2",
    margin: int = 0,
    epsilon: float = 0.0,
    tiled: bool = False,
    pad_to: int = 1,
    room: int = 1,
    record: Record | None = None,
    tile: Tile | None = None,
) -> Sides:
    """Quantize x [rows, cols] with one scale per block along the contraction, or per square block.

    Partial blocks have scales too.

    Args:
        block: elements along the contraction that share a scale: 128 (blockwise) or 32 (MXFP8).
        square: blocks of block x block; block must equal the tile's side (128).
        kind: 'fp32', 'pow2', or 'e8m0', which ignores margin and epsilon.
        tiled: not 'fp32': scales as E8M0 in the MX GEMM's tiled layout (gemm_layouts.py), one for each 1x32 codes.
        room: allocate codes and 1-wide float32 scales for rows up to a multiple of it; the extra rows are not written.
        record: as in quantize_tensor.

    Returns:
        Sides. For codes [R, C], scale_inv is [R, ceil(C / block)], or [ceil(R / block), ceil(C / block)] if square.
        float32 strides are those of torch's blockwise scaled GEMM: [1, R] for 1-wide blocks;
        [ceil4(ceil(C / block)), 1], with zeros in the padding, for square ones. 'e8m0' is float8_e8m0fnu, contiguous.
    """
    source = _source(x)
    tile = tile or _block_tile(source, block, square)
    if tile.rows % block or tile.cols % block or (square and not tile.rows == tile.cols == block):
        raise ValueError(
            f"tile {tile.rows} x {tile.cols} does not hold whole blocks of {block}: choose multiples of it"
            + (", exactly one block where blocks are square" if square else "")
        )
    assert not tiled or (kind != "fp32" and tile.cols % 128 == 0), (
        "tiles of scales are E8M0, and whole in a tile"
    )
    out = _Outputs(source, fmt, direction, tile, pad_to, room)
    row_scale = col_scale = None
    of = block, square, kind, tiled, room, source.device
    if out.rowwise is not None:
        row_scale = _block_scales(source.rows, source.cols, *of)
    if out.columnwise is not None:
        col_scale = _block_scales(source.cols, source.rows, *of)
    if source.rows and source.cols:
        # Scale tiles are always 128 rows high: extra programs fill the padding.
        grid = grid_of(round_up(source.rows, 128), source.cols, tile) if tiled else source.grid(tile)
        row_major, row_minor = _strides(row_scale, source.cols)
        col_major, col_minor = _strides(col_scale, source.rows)
        launch(
            quantize_tiles,
            grid,
            **source.arguments(),
            **out.arguments(),
            row_scale=row_scale,
            row_major=row_major,
            row_minor=row_minor,
            col_scale=col_scale,
            col_major=col_major,
            col_minor=col_minor,
            **_record_arguments(record),
            epsilon=epsilon,
            factor=2.0**-margin,
            E4M3=is_e4m3(fmt),
            KIND=kind_for(kind, margin),
            BLOCK=block,
            SQUARE=square,
            TILED=tiled,
            **tile.options(),
        )
    if kind == "e8m0" or tiled:
        row_scale, col_scale = (
            None if s is None else s.view(torch.float8_e8m0fnu) for s in (row_scale, col_scale)
        )
    return out.sides(row_scale, col_scale)


def write_matrix(source: TileSource) -> torch.Tensor:
    """The matrix of a TileSource, [rows, cols] in its dtype, contiguous: the values that the casts quantize."""
    tile = _tile(source)
    values = torch.empty(source.rows, source.cols, dtype=source.dtype, device=source.device)
    if values.numel():
        launch(write_values, source.grid(tile), **source.arguments(), values=values, **tile.options())
    return values


def _tile(source: TileSource) -> Tile:
    """The default tile of passes without blocks."""
    return SWIGLU_TILE if isinstance(source, (Swiglu, SwigluGradient)) else TENSOR_TILE


def _block_tile(source: TileSource, block: int, square: bool) -> Tile:
    if block == 32:
        return MX_TILE
    if square:
        return SQUARE_TILE
    return BLOCK_TILE if isinstance(source, StoredMatrix) else COMPUTED_BLOCK_TILE


def round_up(size: int, multiple: int) -> int:
    """size rounded up to a multiple."""
    return -(-size // multiple) * multiple


def _strides(scale: torch.Tensor | None, cols: int) -> tuple[int, int]:
    """Strides of a scale [R, blocks] of codes with ``cols`` columns; (0, 0) of None, (bytes a tile row, 1) if tiled."""
    if scale is None:
        return 0, 0
    return (scale.stride(0), scale.stride(1)) if scale.ndim == 2 else (tiled_size(1, cols), 1)


def _block_scales(
    rows: int,
    cols: int,
    block: int,
    square: bool,
    kind: ScaleKind,
    tiled: bool,
    room: int,
    device: torch.device,
) -> torch.Tensor:
    """Uninitialised scales for codes [rows, cols], in the layout that quantize_blocks documents."""
    across = -(-cols // block)
    if tiled:
        return torch.empty(tiled_size(rows, cols), dtype=torch.uint8, device=device)
    if kind == "e8m0":
        return torch.empty(-(-rows // block) if square else rows, across, dtype=torch.uint8, device=device)
    if square:
        wide = round_up(across, 4)  # the kernel writes the padding too
        return torch.empty(-(-rows // block), wide, device=device, dtype=torch.float32)[:, :across]
    return torch.empty(across, round_up(rows, room), device=device, dtype=torch.float32)[:, :rows].t()


class _Outputs:
    """Uninitialised codes of the requested directions: [rows, cols] and [cols, padded rows]."""

    def __init__(
        self,
        source: TileSource,
        fmt: FloatFormat,
        direction: Direction,
        tile: Tile,
        pad_to: int,
        room: int = 1,
    ):
        if direction not in ("rowwise", "columnwise", "both"):
            raise ValueError(f"direction {direction!r} is unknown: use 'rowwise', 'columnwise' or 'both'")
        assert tile.rows % pad_to == 0, "the last tile writes the zeros behind its rows"
        rows, cols = source.rows, source.cols

        def codes(rows: int, cols: int) -> torch.Tensor:
            return codes_like(round_up(rows, room), cols, fmt, source.device)[:rows]

        self.rowwise = codes(rows, cols) if direction != "columnwise" else None
        self.columnwise = codes(cols, round_up(rows, pad_to)) if direction != "rowwise" else None

    def arguments(self) -> dict[str, object]:
        return {
            "row_codes": self.rowwise,
            "col_codes": self.columnwise,
            "col_stride": 0 if self.columnwise is None else self.columnwise.shape[1],
            "ROWWISE": self.rowwise is not None,
            "COLUMNWISE": self.columnwise is not None,
        }

    def sides(self, row_scale: torch.Tensor | None, col_scale: torch.Tensor | None) -> Sides:
        rowwise = columnwise = None
        if self.rowwise is not None:
            assert row_scale is not None
            rowwise = Side(self.rowwise, row_scale)
        if self.columnwise is not None:
            assert col_scale is not None
            columnwise = Side(self.columnwise, col_scale)
        return Sides(rowwise, columnwise)


def _source(x: torch.Tensor | TileSource) -> TileSource:
    return x if isinstance(x, TileSource) else StoredMatrix(x)


def _as_int(amax: torch.Tensor | None) -> torch.Tensor | None:
    """int32 view of an amax [...]: non-negative floats sort like their bits, which atomics and reductions use."""
    return None if amax is None else amax.view(torch.int32)


def _record_arguments(record: Record | None) -> dict[str, object]:
    return {
        "amax": None if record is None else record.amax.view(torch.int32),
        "nonfinite": None if record is None else record.nonfinite,
        "RECORD": record is not None,
    }

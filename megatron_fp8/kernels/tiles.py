"""Where a tile of a matrix comes from and where its codes go: shared by all kernels that quantise.

A kernel sees a matrix [rows, cols] as float32 tiles. A ``TileSource`` says how a tile is made: read as it is, or computed
from what is read (RMSNorm, SwiGLU, SwiGLU's gradient) and rounded to the dtype that the unfused operation would write.
So one set of quantising kernels serves all producers, and a fused kernel gives the codes of the unfused pair.

Codes of the columnwise side are written transposed, [cols, rows] and contiguous, as Hopper's FP8 GEMM reads them. The
tile is turned on chip, and tiles are at least 64 rows high: whole 32-byte sectors are written, one row of bytes a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..numerics.formats import E4M3, FloatFormat
from . import in_memory
from .elements import narrow, widen


class Tile(NamedTuple):
    """How much one program takes: rows x cols of the matrix, by ``warps`` warps of at most ``registers`` a thread."""

    rows: int
    cols: int
    warps: int
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        """The launch's keywords; float contraction is off, so that results do not depend on Triton's default."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {
            "ROWS": self.rows,
            "COLS": self.cols,
            "num_warps": self.warps,
            "enable_fp_fusion": False,
        } | limit


@dataclass(frozen=True)
class TileSource:
    """A matrix [rows, cols] of a dtype, and the tensors it is made of.

    kind: 'plain': x [rows, cols]. 'norm': x, first = rstd [rows], second = weight [cols], offset.
    'swiglu': x [rows, 2 cols] = [gate, up], second = weights [rows] or None. 'swiglu_grad': x = dy [rows, cols / 2],
    first = the forward's [gate, up] [rows, cols], second = weights [rows] or None. Last dimensions have stride 1.
    """

    kind: str
    rows: int
    cols: int
    x: torch.Tensor
    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        # Offsets inside a tile of at most 128 rows (or columns, when turned) are 32-bit numbers.
        if (
            max(self.rows, self.cols, *(t.stride(0) for t in (self.x, self.first) if t is not None))
            >= 1 << 24
        ):
            raise ValueError(
                f"a matrix of {self.rows} x {self.cols} has a side or stride of 2^24 or more: quantise it in pieces"
            )

    def arguments(self) -> dict[str, Any]:
        """What every kernel here takes first."""
        return {
            "x": self.x,
            "x_stride": self.x.stride(0),
            "first": self.first,
            "first_stride": self.first.stride(0) if self.first is not None else 0,
            "second": self.second,
            "offset": self.offset,
            "rows": self.rows,
            "cols": self.cols,
            "SOURCE": self.kind,
            "WEIGHTED": self.second is not None,
        }

    def grid(self, tile: Tile) -> tuple[int]:
        """Programs, one a tile (``place``); at least one row and one column of them."""
        return grid_of(self.rows, self.cols, tile)


def grid_of(rows: int, cols: int, tile: Tile) -> tuple[int]:
    """As many programs as ``place`` tells apart for a matrix: on one axis, since others end at 65,535 programs."""
    return (max(triton.cdiv(rows, tile.rows), 1) * max(triton.cdiv(cols, tile.cols), 1),)


def plain(x: torch.Tensor) -> TileSource:
    """A matrix as it is: [rows, cols], float32, bfloat16 or float16; rows may be strided, columns are copied if they are.

    Raises:
        ValueError: another dtype, or not a matrix.
    """
    if x.ndim != 2:
        raise ValueError(
            f"a matrix [rows, cols] is needed, got shape {tuple(x.shape)}: flatten it to two dimensions"
        )
    x = unit_stride(x)
    return TileSource("plain", x.shape[0], x.shape[1], x)


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself if its last dimension has stride 1, else a contiguous copy; ValueError for a dtype not quantised."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"cannot quantise a tensor of dtype {x.dtype}: float32, bfloat16 or float16 is needed; convert it first"
        )
    x = in_memory(x)
    return x if x.stride(-1) == 1 or (x.shape[-1] == 1 and x.is_contiguous()) else x.contiguous()


def is_e4m3(fmt: FloatFormat) -> bool:
    """The kernels' E4M3 flag; they know E4M3 and E5M2."""
    assert fmt.signed, "E8M0 is a scale format"
    return fmt is E4M3


def codes_like(rows: int, cols: int, fmt: FloatFormat, device: torch.device) -> torch.Tensor:
    """Uninitialised codes [rows, cols] of fmt.dtype."""
    return torch.empty(rows, cols, dtype=fmt.dtype, device=device)


def as_bytes(codes: torch.Tensor | None) -> torch.Tensor | None:
    """The uint8 view that kernels write."""
    return None if codes is None else codes.view(torch.uint8)


@triton.jit
def place(cols, COLS: tl.constexpr):
    """(row of tiles, column of tiles) of this program. Columns are fastest: what is read twice is still in L2."""
    across = (cols - 1) // COLS + 1  # 1 of no columns: the quotient is cut off towards zero
    return tl.program_id(0) // across, tl.program_id(0) % across


@triton.jit
def load(
    x,
    x_stride,
    first,
    first_stride,
    second,
    offset,
    rows,
    cols,
    SOURCE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """This program's tile [ROWS, COLS] of the source in float32; 0 outside of rows x cols, whatever the row's statistic.

    Only the tile's corner is a 64-bit offset: inside it 32 bits do, and save a register an address.
    """
    down_tile, across_tile = place(cols, COLS)
    top, left = down_tile * ROWS, across_tile * COLS
    down = tl.arange(0, ROWS)
    across = tl.arange(0, COLS)
    in_rows = top + down < rows
    in_cols = left + across < cols
    inside = in_rows[:, None] & in_cols[None, :]
    x += top.to(tl.int64) * x_stride
    x_at = (x + left) + (down[:, None] * x_stride + across[None, :])
    DTYPE: tl.constexpr = x.dtype.element_ty
    if SOURCE == "plain":
        return widen(tl.load(x_at, mask=inside, other=0.0))
    elif SOURCE == "norm":
        value = widen(tl.load(x_at, mask=inside, other=0.0))
        rstd = tl.load(first + top + down, mask=in_rows, other=0.0)
        weight = widen(tl.load(second + left + across, mask=in_cols, other=0.0)) + offset
        value = (value * rstd[:, None]) * weight[None, :]
        return tl.where(inside, widen(narrow(value, DTYPE)), 0.0)
    elif SOURCE == "swiglu":
        gate = widen(tl.load(x_at, mask=inside, other=0.0))
        up = widen(tl.load(x_at + cols, mask=inside, other=0.0))
        value = gate * sigmoid(gate) * up
        if WEIGHTED:
            value *= widen(tl.load(second + top + down, mask=in_rows, other=0.0))[:, None]
        return tl.where(inside, widen(narrow(value, DTYPE)), 0.0)
    else:
        half = cols // 2
        is_gate = left + across < half
        pair = tl.where(is_gate, left + across, left + across - half)[None, :]
        first_at = (first + top.to(tl.int64) * first_stride) + (down[:, None] * first_stride + pair)
        gate = widen(tl.load(first_at, mask=inside, other=0.0))
        up = widen(tl.load(first_at + half, mask=inside, other=0.0))
        dy = widen(tl.load(x + (down[:, None] * x_stride + pair), mask=inside, other=0.0))
        if WEIGHTED:
            dy *= widen(tl.load(second + top + down, mask=in_rows, other=0.0))[:, None]
        s = sigmoid(gate)
        dgate = dy * up * s * (1 + gate * (1 - s))
        value = tl.where(is_gate[None, :], dgate, dy * (gate * s))
        return tl.where(inside, widen(narrow(value, DTYPE)), 0.0)


@triton.jit
def sigmoid(x):
    """float32 1 / (1 + exp(-x)), to about |x| * 2^-23 of itself. The divisor is 1 to 2, where fast division is safe."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)


@triton.jit
def store(out, tile, top, left, rows, cols):
    """A tile to ``out`` [rows, cols], contiguous, with its corner at [top, left].

    A tile that is turned should be turned as codes: bytes, a quarter of the numbers.
    """
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    down = tl.arange(0, ROWS)
    across = tl.arange(0, COLS)
    inside = (top + down < rows)[:, None] & (left + across < cols)[None, :]
    at = (out + top.to(tl.int64) * cols + left) + (down[:, None] * cols + across[None, :])
    tl.store(at, tile, mask=inside)

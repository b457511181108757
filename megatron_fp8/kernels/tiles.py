"""Tiles of matrices: how kernels read them, compute them and write their codes.

Codes of the columnwise side are written transposed, [cols, rows] and contiguous, as Hopper's FP8 GEMM reads them. A
tile is transposed on chip, and is at least 64 rows high, so that each of its columns is written as whole 32-byte sectors.

Transposing single bytes is slow: each is one access to shared memory. So four successive rows of the matrix are a quarter
of the tile apart in it (``rows_of``), which assigns them to one thread. The thread packs their four codes of a column
into one word, and words are transposed.

A kernel reads a matrix [rows, cols] as tiles of its dtype. A ``TileSource`` describes the matrix's inputs, and ``load``
computes a tile, rounded to the dtype that the unfused operation would write. So one set of kernels serves all
producers, and a fused kernel gives the codes of the unfused pair.

Each kind of matrix has a class: ``StoredMatrix`` here; ``RmsNorm``, ``Swiglu``, ``SwigluGradient`` in fused_quantize.py.
All have the same list of kernel arguments (x, first, second, offset). So a new kind needs a class and a branch of
``load``, and no kernel's signature changes.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl

from ..numerics.formats import E4M3, FloatFormat
from .cast_dispatch import in_memory
from .device_math import COMPILED, narrow, widen, zero_outside


class Tile(NamedTuple):
    """The part of one program: rows x cols of the matrix, by ``warps`` warps with at most ``registers`` per thread."""

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
    """One program per tile (``place``), all on the first axis: the others are limited to 65,535 programs."""
    return (max(-(-rows // tile.rows), 1) * max(-(-cols // tile.cols), 1),)  # triton.cdiv takes 2 us


def is_e4m3(fmt: FloatFormat) -> bool:
    """The kernels' E4M3 flag; they know E4M3 and E5M2."""
    assert fmt.signed, "E8M0 is a scale format"
    return fmt is E4M3


def codes_like(rows: int, cols: int, fmt: FloatFormat, device: torch.device) -> torch.Tensor:
    """Uninitialised codes [rows, cols] of fmt.dtype."""
    return torch.empty(rows, cols, dtype=fmt.dtype, device=device)


@triton.jit
def place(cols, COLS: tl.constexpr, EACH: tl.constexpr = 1):
    """(row of tiles, column of tiles) of this program. Columns vary fastest, so that data read twice is still in L2.

    EACH: so many successive programs have the same tile.
    """
    across = (cols - 1) // COLS + 1  # 1 without columns: the quotient is truncated towards zero
    return tl.program_id(0) // EACH // across, tl.program_id(0) // EACH % across


@triton.jit
def rows_of(ROWS: tl.constexpr, RUN: tl.constexpr = 4):
    """int32 [ROWS]: the matrix's row, from the tile's first, of each row of a tile: 0, 4, 8 ... 1, 5, 9 ...

    RUN: so many successive rows of the matrix are one thread's.
    """
    at = tl.arange(0, ROWS)
    return at % (ROWS // RUN) * RUN + at // (ROWS // RUN)


@triton.jit
def quarters(tile):
    """Splits a tile [ROWS, COLS] with rows in ``rows_of`` order into four [ROWS / 4, COLS]: rows 4 r, 4 r + 1, 4 r + 2,
    4 r + 3."""
    ROWS: tl.constexpr = tile.shape[0] // 4
    COLS: tl.constexpr = tile.shape[1]
    even, odd = tl.split(tl.permute(tl.reshape(tile, (2, 2, ROWS, COLS)), (2, 3, 0, 1)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def store_turned(out, words, top, left, rows, cols):
    """Writes words of ``quarters``' codes, [ROWS / 4, COLS], to tile [left, top] of contiguous ``out`` [cols, rows].
    rows may exceed the matrix's, within the last tile."""
    ROWS: tl.constexpr = 4 * words.shape[0]
    COLS: tl.constexpr = words.shape[1]
    turned = tl.trans(words)
    four = tl.arange(0, 4)[None, None, :]
    codes = tl.reshape((turned[:, :, None] >> (8 * four)) & 0xFF, (COLS, ROWS)).to(tl.uint8)
    store(out, codes, left, top, cols, rows)


@triton.jit
def store_rows(out, tile, top, left, rows, cols):
    """Writes a tile with rows in ``rows_of`` order to contiguous ``out`` [rows, cols], its corner at [top, left]."""
    store(out, tile, top, left, rows, cols, rows_of(tile.shape[0]))


@triton.jit
def store(out, tile, top, left, rows, cols, down=None):
    """Writes a tile to contiguous ``out`` [rows, cols], its corner at [top, left]; its rows in order, or as ``down``."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    if down is None:
        down = tl.arange(0, ROWS)
    across = tl.arange(0, COLS)
    inside = (top + down < rows)[:, None] & (left + across < cols)[None, :]
    at = (out + top.to(tl.int64) * cols + left) + (down[:, None] * cols + across[None, :])
    tl.store(at, tile, mask=inside)


class TileSource:
    """A matrix [rows, cols] that kernels read, or compute while reading.

    Attributes:
        kind: its branch of ``load``, and its name in messages.
        by_row: which of x, first and second have one row, or number, per row of the matrix.
        rows, cols: the matrix's, not its inputs'.
        dtype, device: the matrix's.

    Raises:
        ValueError: a size or row stride of 2^24 or more.
    """

    kind: ClassVar[str]
    by_row: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        rows: int,
        cols: int,
        x: torch.Tensor,
        first: torch.Tensor | None = None,
        second: torch.Tensor | None = None,
        offset: float = 0.0,
    ):
        self.rows, self.cols = rows, cols
        self.dtype, self.device = x.dtype, x.device
        x_step, first_step = x.stride(0), 0 if first is None else first.stride(0)
        # Offsets inside a tile of at most 128 rows (or columns, if transposed) are 32-bit numbers.
        if max(rows, cols, x_step, first_step) >= 1 << 24:
            raise ValueError(
                f"a matrix of {rows} x {cols} has a side or stride of 2^24 or more: quantize it in pieces"
            )
        self._arguments: dict[str, Any] = {
            "x": x,
            "x_stride": x_step,
            "first": first,
            "first_stride": first_step,
            "second": second,
            "offset": offset,
            "rows": rows,
            "cols": cols,
            "SOURCE": self.kind,
            "WEIGHTED": second is not None,
        }

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Its input tensors; the last dimension of each has stride 1."""
        given = (self._arguments[name] for name in ("x", "first", "second"))
        return tuple(tensor for tensor in given if tensor is not None)

    def part(self, start: int, rows: int) -> TileSource:
        """The matrix of a slice of its rows, in the same memory."""
        found = copy(self)
        found.rows, found._arguments = rows, {**self._arguments, "rows": rows}
        for name in self.by_row:
            if (whole := self._arguments[name]) is not None:
                found._arguments[name] = whole[start : start + rows]
        return found

    def arguments(self) -> dict[str, Any]:
        """The leading arguments of every kernel here."""
        return self._arguments

    def grid(self, tile: Tile) -> tuple[int]:
        """The grid of programs, one per tile (``place``); at least one row and one column."""
        return grid_of(self.rows, self.cols, tile)


class StoredMatrix(TileSource):
    """A matrix in memory.

    Args:
        x: [rows, cols], float32, bfloat16 or float16; rows may be strided, columns are copied if they are.

    Raises:
        ValueError: another dtype, or not a matrix.
    """

    kind = "plain"
    by_row = ("x",)

    def __init__(self, x: torch.Tensor):
        if x.ndim != 2:
            raise ValueError(
                f"a matrix [rows, cols] is needed, got shape {tuple(x.shape)}: flatten it to two dimensions"
            )
        super().__init__(x.shape[0], x.shape[1], unit_stride(x))


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself if its last dimension has stride 1, else a contiguous copy; ValueError for a dtype not quantized."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"cannot quantize a tensor of dtype {x.dtype}: float32, bfloat16 or float16 is needed; convert it first"
        )
    x = in_memory(x)
    return x if x.stride(-1) == 1 or (x.shape[-1] == 1 and x.is_contiguous()) else x.contiguous()


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
    RUN: tl.constexpr = 4,
    EACH: tl.constexpr = 1,
):
    """This program's tile [ROWS, COLS] of the source in x's dtype, its rows in tiles.rows_of order; 0 outside of rows x
    cols, for any statistic of a row.

    | SOURCE        | x            | first                | second                       |
    | ------------- | ------------ | -------------------- | ---------------------------- |
    | 'plain'       | the matrix   |                      |                              |
    | 'norm'        | [rows, cols] | rstd [rows]          | weight [cols], plus offset   |
    | 'swiglu'      | [gate, up]   |                      | weights [rows], if WEIGHTED  |
    | 'swiglu_grad' | dy           | the forward's x      | weights [rows], if WEIGHTED  |

    Each row has an address, from which its columns are constants away. Offsets inside a tile are 32-bit numbers.
    """
    down_tile, across_tile = place(cols, COLS, EACH)
    top, left = down_tile * ROWS, across_tile * COLS
    down = rows_of(ROWS, RUN)
    across = tl.arange(0, COLS)
    in_rows = top + down < rows
    in_cols = left + across < cols
    inside = in_rows[:, None] & in_cols[None, :]
    x += top.to(tl.int64) * x_stride
    x_at = (x + left + down * x_stride)[:, None] + across[None, :]
    DTYPE: tl.constexpr = x.dtype.element_ty
    if SOURCE == "plain":
        return tl.load(x_at, mask=inside, other=0.0)
    elif SOURCE == "norm":
        value = widen(tl.load(x_at, mask=inside, other=0.0))
        rstd = tl.load(first + top + down, mask=in_rows, other=0.0)
        weight = widen(tl.load(second + left + across, mask=in_cols, other=0.0)) + offset
        value = (value * rstd[:, None]) * weight[None, :]
        if (top + ROWS > rows) | (left + COLS > cols):  # 0 times a statistic that is NaN
            value = zero_outside(value, inside)
        return narrow(value, DTYPE)
    elif SOURCE == "swiglu":
        gate = widen(tl.load(x_at, mask=inside, other=0.0))
        up = widen(tl.load(x_at + cols, mask=inside, other=0.0))
        value = gate * sigmoid(gate) * up
        if WEIGHTED:
            value *= widen(tl.load(second + top + down, mask=in_rows, other=0.0))[:, None]
            if left + COLS > cols:
                value = zero_outside(value, inside)
        return narrow(value, DTYPE)
    else:
        half = cols // 2
        weight = 1.0
        if WEIGHTED:
            weight = widen(tl.load(second + top + down, mask=in_rows, other=0.0))[:, None]
        # A tile inside one half, as all are if half is a multiple of COLS, computes that half only.
        if left + COLS <= half:
            first += top.to(tl.int64) * first_stride + left
            first_at = (first + down * first_stride)[:, None] + across[None, :]
            gate = widen(tl.load(first_at, mask=inside, other=0.0))
            up = widen(tl.load(first_at + half, mask=inside, other=0.0))
            dy = widen(tl.load(x_at, mask=inside, other=0.0))
            value = narrow(gate_gradient(gate, up, dy * weight if WEIGHTED else dy), DTYPE)
        elif left >= half:
            first += top.to(tl.int64) * first_stride + (left - half)
            first_at = (first + down * first_stride)[:, None] + across[None, :]
            gate = widen(tl.load(first_at, mask=inside, other=0.0))
            dy = widen(tl.load(x_at - half, mask=inside, other=0.0))
            value = narrow(up_gradient(gate, dy * weight if WEIGHTED else dy), DTYPE)
        else:
            is_gate = left + across < half
            pair = tl.where(is_gate, left + across, left + across - half)[None, :]
            first_at = (first + top.to(tl.int64) * first_stride) + (down[:, None] * first_stride + pair)
            gate = widen(tl.load(first_at, mask=inside, other=0.0))
            up = widen(tl.load(first_at + half, mask=inside, other=0.0))
            dy = widen(tl.load(x + (down[:, None] * x_stride + pair), mask=inside, other=0.0))
            dy = dy * weight if WEIGHTED else dy
            both = tl.where(is_gate[None, :], gate_gradient(gate, up, dy), up_gradient(gate, dy))
            value = narrow(both, DTYPE)
        if WEIGHTED and left + COLS > cols:  # 0 times a weight that is Inf or NaN
            value = tl.where(inside, value, tl.zeros_like(value))
        return value


@triton.jit
def load_halves(
    x, x_stride, first, first_stride, second, rows, half,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """This program's tiles [ROWS, COLS] of both halves of SwiGLU's gradient (arguments as ``load``'s for 'swiglu_grad'):
    dgate and dup of ``half`` columns each, from one sigmoid."""
    down_tile, across_tile = place(half, COLS)
    top, left = down_tile * ROWS, across_tile * COLS
    down, across = rows_of(ROWS), tl.arange(0, COLS)
    in_rows = top + down < rows
    inside = in_rows[:, None] & (left + across < half)[None, :]
    DTYPE: tl.constexpr = x.dtype.element_ty
    dy_at = (x + top.to(tl.int64) * x_stride + left) + (down[:, None] * x_stride + across[None, :])
    at = (first + top.to(tl.int64) * first_stride + left) + (down[:, None] * first_stride + across[None, :])
    gate = widen(tl.load(at, mask=inside, other=0.0))
    up = widen(tl.load(at + half, mask=inside, other=0.0))
    dy = widen(tl.load(dy_at, mask=inside, other=0.0))
    if WEIGHTED:
        dy *= widen(tl.load(second + top + down, mask=in_rows, other=0.0))[:, None]
        if left + COLS > half:  # 0 times a weight that is Inf or NaN
            dy = zero_outside(dy, inside)
    s, rest = sigmoid_and_rest(gate)
    return narrow(dy * up * s * (1 + gate * rest), DTYPE), narrow(dy * (gate * s), DTYPE)


@triton.jit
def gate_gradient(gate, up, dy):
    """float32 derivative of silu(gate) * up with respect to gate; the same operations as in ``load_halves``."""
    s, rest = sigmoid_and_rest(gate)
    return dy * up * s * (1 + gate * rest)


@triton.jit
def up_gradient(gate, dy):
    """float32 derivative of silu(gate) * up with respect to up."""
    return dy * (gate * sigmoid(gate))


@triton.jit
def sigmoid(x):
    """float32 1 / (1 + exp(-x)), to about |x| * 2^-23 of itself; subnormal results are kept. NaN: any number."""
    s, _ = sigmoid_and_rest(x)
    return s


@triton.jit
def sigmoid_and_rest(x):
    """(sigmoid(x), 1 - sigmoid(x)), the latter no smaller than 2^-120.

    exp(x) / (1 + exp(x)). exp(x) is computed as a square; its root is never subnormal unless the square is 0. It is
    limited to 2^120, where the quotient is 1. So the fast instructions, which flush subnormals, see none.
    """
    root = _exp2(tl.minimum(x * 0.7213475204444817, 60.0))  # log2(e) / 2
    power = root * root
    rest = _inverse(1 + power)
    return power * rest, rest


@triton.jit
def _exp2(x):
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _inverse(x):
    if COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x

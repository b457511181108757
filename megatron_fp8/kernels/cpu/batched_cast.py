"""Casts and products of equal matrices in one call of C, as experts have them.

Each is as ``matrix_quantize.quantize`` and ``grouped.multiply_each`` make it.

What C is told of a matrix takes Python longer than C takes with a small expert, so what all share is told once and
copied, and an expert adds its addresses. Codes of all lie in one tensor, one behind the other, and so do scales.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from ...numerics.rule import Direction, Rule
from . import emulation, grouped, matrix_quantize
from .grouped import ProductStruct
from .matrix_quantize import DTYPES, CastStruct, CutStruct

_CAST, _PRODUCT = ctypes.sizeof(CastStruct), ctypes.sizeof(ProductStruct)


class Parts(NamedTuple):
    """Matrices [rows, cols] in memory to be cast by one rule; of those without rows nothing is made.

    Attributes:
        at: their addresses; each is contiguous, of ``dtype``, and stays there until it is cast.
        running: addresses of float32 numbers, where their amaxes are put if they are larger; None: nowhere.
        scales: addresses of float32 scales that were there before; None: scales are made of amaxes.
    """

    at: Sequence[int]
    rows: Sequence[int]
    cols: int
    dtype: torch.dtype
    rule: Rule
    direction: Direction
    running: Sequence[int | None]
    scales: Sequence[int | None]


class Stack(NamedTuple):
    """What one cut gave of all parts.

    Attributes:
        codes: float8 [sum of rows, cols].
        scale_inv: float32 or float8_e8m0fnu, flat: [row blocks, column blocks] of each part, one behind the other.
        rows: of each part.
        first: where each part's scales begin.
        across: blocks side by side.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    rows: tuple[int, ...]
    first: tuple[int, ...]
    across: int

    def part(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes [rows, cols], scale_inv [row blocks, column blocks]) of one part: views."""
        begin = sum(self.rows[:i])
        end = self.first[i + 1] if i + 1 < len(self.first) else self.scale_inv.numel()
        scales = self.scale_inv[self.first[i] : end].view(-1, self.across)
        return self.codes[begin : begin + self.rows[i]], scales


class Cast(NamedTuple):
    """What became of parts: a stack for each cut, and of each part how many elements are NaN or Inf."""

    stacks: list[Stack]
    special: list[int]


def in_c(rule: Rule, direction: Direction) -> bool:
    """Whether parts can be cast by this rule here: not by random bits, and in blocks that fill tiles or span a matrix."""
    spans = rule.scale != "e8m0" and 0 in (rule.granularity.rows, rule.granularity.cols)
    return not rule.stochastic and (spans or all(map(matrix_quantize.divides, _cuts(rule, direction))))


def _cuts(rule: Rule, direction: Direction) -> list[tuple[int, int]]:
    high, wide = rule.granularity.rows, rule.granularity.cols
    if high == wide or direction == "rowwise":
        return [(high, wide)]
    return [(wide, high)] if direction == "columnwise" else [(high, wide), (wide, high)]


def quantize(wanted: Sequence[Parts]) -> list[Cast]:
    """Codes and scales of all parts, with the bits of ``matrix_quantize.quantize`` of each; one call of C."""
    told = (CastStruct * sum(rows > 0 for parts in wanted for rows in parts.rows))()
    to = iter(told)
    kept = [_told(parts, to) for parts in wanted]
    elements = sum(sum(parts.rows) * parts.cols for parts in wanted)
    failed = emulation.compiled().cast_each(told, ctypes.c_int64(len(told)), emulation.thread_count(elements))
    if failed or any(one.special < 0 for one in told):
        raise MemoryError("no memory for a tile of a matrix, 700 KB a thread")
    done = iter(told)
    special = [[next(done).special if rows else 0 for rows in parts.rows] for parts in wanted]
    return [Cast(made, found) for (made, _), found in zip(kept, special, strict=True)]


def _told(parts: Parts, told: Iterator[CastStruct]) -> tuple[list[Stack], torch.Tensor]:
    """Tells C of the next parts; (what their codes and scales will be, memory for their amaxes)."""
    rule, cols, rows = parts.rule, parts.cols, tuple(parts.rows)
    amaxes = torch.empty(max(len(rows), 1), dtype=torch.float32, device="cpu")
    common = CastStruct(
        cols=cols, rule=matrix_quantize.scale_rule(rule), from_dtype=DTYPES[parts.dtype], finite=1
    )
    common.to_e5m2 = rule.fmt.name == "e5m2"
    made = [_stack(parts, rows, cut) for cut in _cuts(rule, parts.direction)]
    common.count = len(made)
    for i, cut in enumerate(_cuts(rule, parts.direction)):
        common.cuts[i] = CutStruct(*cut)
    codes = [stack.codes.data_ptr() for stack in made]
    scales = [(stack.scale_inv.data_ptr(), stack.scale_inv.element_size(), stack.first) for stack in made]
    largest = amaxes.data_ptr()
    for i, (at, high, running, given) in enumerate(
        zip(parts.at, rows, parts.running, parts.scales, strict=True)
    ):
        if not high:
            continue
        to = next(told)
        ctypes.memmove(ctypes.byref(to), ctypes.byref(common), _CAST)
        to.x, to.rows, to.amax, to.given, to.running = at, high, largest + 4 * i, given, running
        for cut, code, (scale, size, first) in zip(to.cuts, codes, scales, strict=False):
            cut.codes, cut.scale_inv = code, scale + size * first[i]
        codes = [code + high * cols for code in codes]
    return made, amaxes


def _stack(parts: Parts, rows: tuple[int, ...], cut: tuple[int, int]) -> Stack:
    """Memory for what a cut gives."""
    rule = parts.rule
    codes = torch.empty(sum(rows), parts.cols, dtype=torch.uint8, device="cpu")
    first, across = _scales(rows, parts.cols, cut)
    scales = torch.empty(first[-1], dtype=_bytes_of(rule), device="cpu")
    return _stack_of(codes, scales, rows, first, across, rule)


def _scales(rows: Sequence[int], cols: int, cut: tuple[int, int]) -> tuple[list[int], int]:
    """Where each part's scales begin, and the last ones end; blocks side by side."""
    high, wide = cut
    across = -(-cols // wide) if wide else 1
    return list(accumulate((across * (-(-r // high) if high else 1) for r in rows), initial=0)), across


def _bytes_of(rule: Rule) -> torch.dtype:
    return torch.uint8 if rule.scale == "e8m0" else torch.float32


def _stack_of(
    codes: torch.Tensor, scales: torch.Tensor, rows: Sequence[int], first: list[int], across: int, rule: Rule
) -> Stack:
    scales = scales.view(torch.float8_e8m0fnu) if rule.scale == "e8m0" else scales
    return Stack(codes.view(rule.fmt.dtype), scales, tuple(rows), tuple(first[:-1]), across)


def columnwise_again(
    codes: torch.Tensor, scales: torch.Tensor, rows: Sequence[int], cols: int, rule: Rule
) -> Stack:
    """The last stack of a cast for columns, of its memory: codes and scales as bytes or float32, flat; the latter may be
    longer."""
    (cut,) = _cuts(rule, "columnwise")
    first, across = _scales(rows, cols, cut)
    return _stack_of(codes.view(sum(rows), cols), scales[: first[-1]], rows, first, across, rule)


# ------------------------------------------------------------------------------------------------------------ products


class Side(NamedTuple):
    """One side of each product: the parts of a stack as they lie, [rows, k], or turned, [cols, rows].

    Attributes:
        rule: by which they were cast.
        special: of each part how many elements were NaN or Inf; not 0 where that is not known.
    """

    stack: Stack
    turned: bool
    rule: Rule
    special: Sequence[int]

    @property
    def rows(self) -> list[int]:
        """Of each product's side."""
        cols = self.stack.codes.shape[1]
        return [cols] * len(self.stack.rows) if self.turned else list(self.stack.rows)

    def operand(self, i: int) -> emulation.Operand:
        """That of one product."""
        codes, scales = self.stack.part(i)
        grain = self.rule.granularity
        scale = scales.view(()) if grain.is_tensor else scales.t() if self.turned else scales
        pow2 = self.rule.scale != "fp32"
        values = codes.t() if self.turned else codes
        return emulation.Operand(values, scale, (grain.rows, grain.cols), pow2, not self.special[i])


def taken(rule: Rule) -> bool:
    """Whether products read parts of this rule: scales along k are powers of two."""
    return rule.granularity.cols == 0 or (rule.scale != "fp32" and rule.granularity.cols % 32 == 0)


def multiply(
    a: Side, b: Side, outs: Sequence[int], dtype: torch.dtype, these: Sequence[int], *, add: bool
) -> list[int]:
    """a[i] [M, K] @ b[i] [N, K]^T for each i of ``these``, to outs[i]; those that were not made, since their scales are
    outside what ``emulation.multiply`` takes: their results are as they were.

    Args:
        outs: addresses of contiguous matrices [M, N] of dtype, float32 or bfloat16; add: to the float32 that is there.
    """
    if not these:
        return []
    told = (ProductStruct * len(these))()
    common = ProductStruct()
    common.out.bfloat16, common.out.add = dtype == torch.bfloat16, add
    parts_a, parts_b = _describe(a, common.a), _describe(b, common.b)
    elements = 0
    for i, to in zip(these, told, strict=True):
        ctypes.memmove(ctypes.byref(to), ctypes.byref(common), _PRODUCT)
        to.a.at, to.a.scale, m, k = parts_a[i]
        to.b.at, to.b.scale, n, k_too = parts_b[i]
        to.a.finite, to.b.finite = not a.special[i], not b.special[i]
        assert k == k_too, (a.stack.rows, b.stack.rows)
        if k == 1:  # a dimension of one element may have any stride
            to.a.k_step = to.b.k_step = 1
        to.out.at, to.m, to.n, to.k = outs[i], m, n, k
        elements += max(m * k, n * k, m * n)
    grouped.make(told, elements, None)
    return [i for i, to in zip(these, told, strict=True) if to.done]


def _describe(side: Side, to: emulation.Side) -> list[tuple[int, int, int, int]]:
    """Tells of what all parts of a side share; of each part where codes and scales lie, its rows and its k."""
    stack, turned, rule, _ = side
    cols, size = stack.codes.shape[1], stack.scale_inv.element_size()
    to.row_step, to.k_step = (1, cols) if turned else (cols, 1)
    to.format, to.e8m0 = emulation.FORMATS[stack.codes.dtype], rule.scale == "e8m0"
    to.block_rows, to.block_k = rule.granularity.rows, rule.granularity.cols
    if not rule.granularity.is_tensor:
        to.scale_row_step, to.scale_k_step = (1, stack.across) if turned else (stack.across, 1)
    at = emulation.address(stack.codes, stack.codes.dtype, sum(stack.rows) * cols).value or 0
    kind = torch.float8_e8m0fnu if rule.scale == "e8m0" else torch.float32
    scales = emulation.address(stack.scale_inv, kind, stack.scale_inv.numel()).value or 0
    begins = accumulate(stack.rows, initial=0)
    return [
        (at + begin * cols, scales + size * first, *((cols, rows) if turned else (rows, cols)))
        for begin, rows, first in zip(begins, stack.rows, stack.first, strict=False)
    ]

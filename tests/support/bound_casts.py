"""Native casts that compute on a CPU and can be bound, so that whole linears can (linear/bound.py).

A bound cast is strict: what it is given lies where a pointer says, and is read with the shape, strides and dtype that it
was bound to. Whoever calls it with a matrix that lies otherwise gets other codes, as on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megatron_fp8 import quantizer
from megatron_fp8.backends import specified
from megatron_fp8.backends.base import Running
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native.bound import Bound, lies_plainly
from megatron_fp8.backends.native.contraction import whole
from megatron_fp8.backends.native.layout import swizzle
from megatron_fp8.numerics.rule import Direction, Granularity, Rule
from megatron_fp8.tensor import Float8Tensor, QuantizedSide
from tests.support.scaled_mm import fake_torch

DEVICE = -1
"""The device that bound casts are for: get_device() of tensors on the CPU."""


def as_cast(side: QuantizedSide) -> QuantizedSide:
    """As the linear's casts lay it: codes in order, scales of 1x128 blocks turned, MX's in tiles, 128x128 contiguous."""
    side = replace(side, codes=side.codes.contiguous())
    if side.granularity == Granularity(1, 128):
        turned = side.scale_inv.new_empty(side.scale_inv.shape[::-1]).t()  # strides, of one column too
        return replace(side, scale_inv=turned.copy_(side.scale_inv))
    if side.granularity == Granularity(1, 0):
        return replace(side, scale_inv=side.scale_inv.flatten().clone().view(-1, 1))
    if side.granularity == Granularity(1, 32):
        return replace(side, scale_inv=swizzle(side.scale_inv), tiled=True)
    return replace(side, scale_inv=side.scale_inv.clone())


def as_column_cast(side: QuantizedSide) -> QuantizedSide:
    """As they lay a columnwise side: with zeros behind the last row, to the end of a block."""
    side = as_cast(side)
    rows, cols = side.codes.shape
    length = -(-cols // whole(side.granularity)) * whole(side.granularity)
    codes = torch.zeros(rows, length, dtype=torch.uint8)
    codes[:, :cols] = side.codes.view(torch.uint8)
    return replace(side, codes=codes.view(side.codes.dtype), padding=length - cols)


class Machine:
    """What bound casts meet. Attributes: hooks: a kernel has some; device: the current one; bound: casts that ran."""

    def __init__(self) -> None:
        self.hooks, self.device, self.bound = False, DEVICE, 0


class _Cast:
    def __init__(self, machine: Machine, x: torch.Tensor, work: Any):
        self._machine, self._work = machine, work
        self._lies = x.shape, x.stride(), x.dtype
        self._align = x.data_ptr() % 16

    def ready(self) -> int | None:
        return None if self._machine.hooks or self._machine.device != DEVICE else 7

    def __call__(self, pointer: int, stream: int) -> list[torch.Tensor]:
        assert stream == 7 and pointer % 16 == self._align
        self._machine.bound += 1
        shape, strides, dtype = self._lies
        size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = (ctypes.c_byte * (size * dtype.itemsize)).from_address(pointer)
        x = torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
        return [t for side in self._work(x).sides if side is not None for t in (side.codes, side.scale_inv)]


class _Casts:
    """In place of BoundCasts."""

    machine: Machine

    def __init__(self, rule: Rule):
        self._rule = rule
        self._met: dict[Any, tuple[int, Bound | None]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        scale: torch.Tensor | None,
        running: Running | None,
        for_product: bool,
    ) -> Float8Tensor:
        def work(x: torch.Tensor) -> Float8Tensor:
            done = specified.quantize(x, self._rule, direction, scale=scale)
            if running is not None:
                torch.maximum(running.amax, done.amax, out=running.amax)
                if done.nonfinite is not None:
                    running.nonfinite.add_(done.nonfinite)
            row, column = done.tensor.sides
            if for_product:
                row, column = row and as_cast(row), column and as_column_cast(column)
            return Float8Tensor(row, column, x.dtype)

        found = work(x)
        key = self._key(x, direction, scale, running, for_product)
        times, bound = self._met.get(key, (0, None))
        if times == 1 and lies_plainly(x):
            row, column = found.sides
            side = row or column
            assert side is not None
            facts = side.granularity, side.pow2, side.finite, side.tiled
            padding = 0 if column is None else column.padding
            cast = _Cast(self.machine, x, work)
            bound = Bound(cast, row is not None, column is not None, facts, padding)
        self._met[key] = times + 1, bound
        return found

    def bound(
        self,
        x: torch.Tensor,
        direction: Direction,
        *,
        scale: torch.Tensor | None,
        running: Running | None,
        for_product: bool,
    ) -> Bound | None:
        return self._met.get(self._key(x, direction, scale, running, for_product), (0, None))[1]

    def _key(self, x: torch.Tensor, *others: Any) -> Any:
        direction, scale, running, for_product = others
        lies = x.shape, x.stride(), x.dtype, x.data_ptr() % 16
        return *lies, direction, scale is None, running is None, for_product


@contextmanager
def casts_that_bind() -> Iterator[Machine]:
    """Inside, native linears cast and multiply on the CPU, and their casts are bound as a GPU's are."""
    machine = Machine()
    casts = type("_MachineCasts", (_Casts,), {"machine": machine})
    with (
        mock.patch.object(quantizer, "BoundCasts", casts),
        mock.patch.object(native, "quantize", specified.quantize),
        fake_torch(),
    ):
        yield machine

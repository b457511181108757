"""Casts of the native backend, computed on a CPU: sides lie as its kernels lay them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from megatron_fp8.backends import reference
from megatron_fp8.backends.base import CastRequest, CastResult
from megatron_fp8.backends.native import backend as native
from megatron_fp8.backends.native.backend import padded_length
from megatron_fp8.backends.native.placement import swizzle
from megatron_fp8.numerics.rule import Direction, Granularity, Rule
from megatron_fp8.tensor import Float8Tensor, QuantizedSide
from tests.support.scaled_mm import fake_torch


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
    length = -(-cols // padded_length(side.granularity)) * padded_length(side.granularity)
    codes = torch.zeros(rows, length, dtype=torch.uint8)
    codes[:, :cols] = side.codes.view(torch.uint8)
    return replace(side, codes=codes.view(side.codes.dtype), padding=length - cols)


@contextmanager
def native_casts_on_cpu() -> Iterator[None]:
    """Inside, the native backend casts and multiplies on the CPU; sides for a product lie as its own casts lay them."""

    def quantize(
        x: torch.Tensor, rule: Rule, direction: Direction, *, for_product: bool = False, **options: Any
    ) -> CastResult:
        done = reference.quantize(CastRequest(x, rule, direction, **options))
        row, column = done.tensor.sides
        if for_product:
            row, column = row and as_cast(row), column and as_column_cast(column)
        return replace(done, tensor=Float8Tensor(row, column, x.dtype))

    with mock.patch.object(native, "quantize", quantize), fake_torch():
        yield

"""Products of a layer's experts in one call of C (grouped.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import emulation
from .emulation import Operand


class Product(NamedTuple):
    """a [M, K] @ b [N, K]^T, to be written to ``out``, or added to it.

    Attributes:
        a, b: what ``emulation.multiplies`` takes, none of M, N and K being 0.
        out: float32 or bfloat16 [M, N], contiguous; ``add``: float32.
    """

    a: Operand
    b: Operand
    out: torch.Tensor
    add: bool = False


class ProductStruct(ctypes.Structure):
    """grouped.c's."""

    _fields_ = (
        ("a", emulation.Side),
        ("b", emulation.Side),
        ("out", emulation.Out),
        ("m", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("done", ctypes.c_int32),
    )


def multiply_each(products: Sequence[Product], *, loop: int | None = None) -> list[bool]:
    """Make all products; which of them were made: the others' scales are outside what ``emulation.multiply`` takes, and
    their ``out`` is as it was.

    Args:
        loop: as of ``emulation.multiply``.
    """
    if not products:
        return []
    told, kept = (
        (ProductStruct * len(products))(),
        [],
    )  # kept: C reads copies of operands that have no dense dimension
    elements = 0
    for each, (a, b, out, add) in zip(told, products, strict=True):
        values = emulation.dense(a.values), emulation.dense(b.values)
        kept.append(values)
        (m, k), n = a.values.shape, b.values.shape[0]
        assert b.values.shape[1] == k and out.shape == (m, n), (a.values.shape, b.values.shape, out.shape)
        each.a, each.b = emulation.side_of(a, values[0]), emulation.side_of(b, values[1])
        each.out = emulation.out_of(out, None, add=add)
        each.m, each.n, each.k = m, n, k
        elements += max(m * k, n * k, m * n)
    threads = emulation.thread_count(elements)
    done = emulation.compiled().gemm_each(
        told, ctypes.c_int64(len(told)), loop or emulation.inner_loop(), threads
    )
    if done < 0 or any(each.done < 0 for each in told):
        raise MemoryError(f"no memory to pack the matrices of {len(told)} products")
    return [each.done == 0 for each in told]

"""Products of a layer's experts in one call of C (grouped.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import emulation
from .emulation import Operand


class Product(NamedTuple):
    """a [M, K] @ b [N, K]^T, written to ``out``, or added to it.

    Attributes:
        a, b: operands that ``emulation.fits``; M, N and K are not 0.
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
    """Makes the products. Returns which were made: the scales of others are outside of ``emulation.multiply``'s range,
    and their ``out`` is unchanged.

    Args:
        loop: as in ``emulation.multiply``.
    """
    if not products:
        return []
    structs = (ProductStruct * len(products))()
    values: list[torch.Tensor] = []  # keeps alive the copies, for C, of operands without a dense dimension
    elements = 0
    for each, (a, b, out, add) in zip(structs, products, strict=True):
        (m, k), n = a.shape, b.shape[0]
        assert b.shape[1] == k and out.shape == (m, n), (a.shape, b.shape, out.shape)
        (each.a, values_a), (each.b, values_b) = emulation.side_of(a), emulation.side_of(b)
        values += values_a, values_b
        each.out = emulation.out_of(out, None, add=add)
        each.m, each.n, each.k = m, n, k
        elements += max(m * k, n * k, m * n)
    threads = emulation.thread_count(elements)
    done = emulation.load_kernels().gemm_each(
        structs, ctypes.c_int64(len(structs)), loop or emulation.inner_loop(), threads
    )
    if done < 0 or any(each.done < 0 for each in structs):
        raise MemoryError(f"no memory to pack the matrices of {len(structs)} products")
    return [each.done == 0 for each in structs]

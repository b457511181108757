"""Block amaxes of CPU tensors, and their E8M0 scales, in C (emulation.c)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from .emulation import FLOATS, address, compiled, thread_count


class _Cut(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int64), ("cols", ctypes.c_int64), ("largest", ctypes.c_void_p))


def block_amaxes(x: torch.Tensor, blocks: Sequence[tuple[int, int]]) -> tuple[list[torch.Tensor], int]:
    """As ``numerics.scaling.block_amaxes`` of a contiguous matrix; (amaxes, how many elements are NaN or Inf)."""
    rows, cols = x.shape
    integer, inf = FLOATS[x.dtype]
    unit = math.lcm(*(r for r, _ in blocks if r))  # no block of rows is shared by two threads
    threads = thread_count(x.numel())
    largest = [
        torch.zeros(
            -(-rows // r) if r else threads, -(-cols // (c or max(cols, 1))), dtype=integer, device="cpu"
        )
        for r, c in blocks
    ]
    cuts = [
        _Cut(r, c or max(cols, 1), address(found, integer, found.numel()))
        for (r, c), found in zip(blocks, largest, strict=True)
    ]
    kernel = compiled().amax32 if integer == torch.int32 else compiled().amax16
    kernel.restype = ctypes.c_int64
    nonfinite = kernel(
        address(x, x.dtype, rows * cols),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
        ctypes.c_uint32(inf),
        (_Cut * len(cuts))(*cuts),
        len(cuts),
        ctypes.c_int64(unit),
        threads,
    )
    if nonfinite < 0:
        raise MemoryError(f"no memory for a row of {cols} elements")
    for i, (block_rows, _) in enumerate(blocks):
        if block_rows == 0:
            largest[i] = largest[i].amax(0, keepdim=True)
    return [found.view(x.dtype).to(torch.float32) for found in largest], nonfinite


def e8m0_of_amax(amax: torch.Tensor, max_exponent: int) -> torch.Tensor:
    """As ``numerics.scaling.compute_e8m0``: uint8, amax's shape; max_exponent is the format's."""
    n = amax.numel()
    e8m0 = torch.empty(amax.shape, dtype=torch.uint8, device="cpu")
    compiled().e8m0_of_amax(
        address(amax, torch.float32, n), address(e8m0, torch.uint8, n), ctypes.c_int64(n), max_exponent
    )
    return e8m0


def power_of_e8m0(e8m0: torch.Tensor, inverse: bool) -> torch.Tensor:
    """float32 2^(e8m0 - 127) of uint8 exponents, or 2^(127 - e8m0); NaN of 0xFF."""
    n = e8m0.numel()
    power = torch.empty(e8m0.shape, dtype=torch.float32, device="cpu")
    compiled().power_of_e8m0(
        address(e8m0, torch.uint8, n), address(power, torch.float32, n), ctypes.c_int64(n), int(inverse)
    )
    return power

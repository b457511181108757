"""Drawn matrices, codes and scales for calls of the kernels, and bytes compared with what they have to be."""

from __future__ import annotations

import numpy as np
import torch

Draw = np.random.Generator
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BITS = {2: torch.int16, 4: torch.int32}
SIZES = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def size(draw: Draw, most: int = 300, smallest: int = 0) -> int:
    """A number of rows or columns: any, or one at a border of vectors and tiles."""
    one = int(draw.choice(SIZES)) if draw.random() < 0.4 else int(draw.integers(smallest, most + 1))
    return max(smallest, min(most, one))


def seeded(draw: Draw) -> torch.Generator:
    return torch.Generator().manual_seed(int(draw.integers(2**31)))


def matrix(draw: Draw, rows: int, cols: int, dtype: torch.dtype, finite: bool | None = None) -> torch.Tensor:
    """Numbers of one size, or of many, zeros, subnormals; with NaN and Inf unless `finite`; or any bits at all."""
    generator, kind = seeded(draw), draw.integers(4) if finite is None else 3 * int(finite)
    if kind == 0 and finite is None:
        bits = torch.randint(-(2**31), 2**31, (rows, cols), generator=generator)
        return bits.to(torch.int32).to(BITS[dtype.itemsize]).view(dtype)
    x = torch.randn(rows, cols, generator=generator)
    spread = int(draw.choice([0, 3, 30]))
    x *= 10.0 ** torch.randint(-spread, spread + 1, (rows, 1), generator=generator)
    x *= 10.0 ** torch.randint(-spread, spread + 1, (1, cols), generator=generator).clamp(-8, 8)
    x[torch.rand(rows, cols, generator=generator) < draw.choice([0, 0.1, 0.99])] = -0.0
    x = x.to(dtype)
    if kind == 3 or finite:
        return x.nan_to_num(1.0, 2.0, -2.0)
    if finite is None or not finite:
        x[torch.rand(rows, cols, generator=generator) < 0.01] = torch.inf
        x[torch.rand(rows, cols, generator=generator) < 0.01] = -torch.nan
    return x


def coded(draw: Draw, rows: int, cols: int, fmt: str, special: bool) -> torch.Tensor:
    """uint8 codes: all of them, or all that are finite; sometimes zeros for the most part, or no small ones."""
    generator = seeded(draw)
    most = 0x80 if special else {"e4m3": 0x7F, "e5m2": 0x7C}[fmt]
    low = int(draw.choice([0, 0, 8]))
    codes = torch.randint(low, most, (rows, cols), generator=generator, dtype=torch.uint8)
    if draw.random() < 0.2:
        codes[torch.rand(rows, cols, generator=generator) < 0.95] = 0
    return codes | torch.randint(0, 2, (rows, cols), generator=generator, dtype=torch.uint8) << 7


def positive(
    draw: Draw, rows: int, cols: int, pow2: bool, least: int = -126, most: int = 127
) -> torch.Tensor:
    """float32 scales, normal numbers from 2^least to 2^(most + 1); of one size, or of all."""
    generator = seeded(draw)
    if draw.random() < 0.6:
        least, most = max(least, -12), min(most, 12)
    exponents = torch.randint(least, most + 1, (rows, cols), generator=generator)
    mantissas = torch.zeros(rows, cols) if pow2 else torch.rand(rows, cols, generator=generator)
    return torch.ldexp(1 + mantissas, exponents).clamp(max=torch.finfo(torch.float32).max)


def spread(scale: torch.Tensor, block: tuple[int, int], rows: int, cols: int) -> torch.Tensor:
    """[rows, cols]: of each element the scale of its block."""
    return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def blocks(total: int, block: int) -> int:
    return -(-total // block)


def differs(what: str, given: bytearray, expected: torch.Tensor, any_nan: bool = False) -> str | None:
    """What is wrong with bytes that have to be a tensor's. any_nan: one NaN is as good as another."""
    raw = torch.frombuffer(given, dtype=torch.uint8) if given else torch.empty(0, dtype=torch.uint8)
    found = raw.view(expected.dtype).view(expected.shape)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.dtype.itemsize]
    wrong = found.view(integer) != expected.contiguous().view(integer)
    if any_nan:
        wrong &= ~(found.isnan() & expected.isnan())
    if not bool(wrong.any()):
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, first at {at}: {found[at]} for {expected[at]}"
    )


def first(*faults: str | None) -> str | None:
    return next((fault for fault in faults if fault is not None), None)


def int32(returned: int) -> int:
    """What a function that gives an int32 gave: the upper half of the register is nobody's."""
    return (returned + 2**31) % 2**32 - 2**31

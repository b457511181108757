"""NVFP4 written out in NumPy by docs/numerics.md, without the package: what its codes and scales are held against."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .reference import philox4x32_10

F32 = np.float32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F32)
_MIDPOINTS = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
_LARGEST_F32 = np.finfo(F32).max
# fmt: off
_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], F32)
# fmt: on


class Matrix(NamedTuple):
    """Codes [M, K in whole blocks], scales of blocks of ``rows`` x 16 as float32, the tensor's amax."""

    codes: np.ndarray
    scales: np.ndarray
    amax: np.float32
    rows: int

    def values(self) -> np.ndarray:
        """float64: code * block scale, without the tensor's scale."""
        numbers = np.concatenate([VALUES, -VALUES]).astype(np.float64)[self.codes]
        return numbers * np.kron(self.scales.astype(np.float64), np.ones((self.rows, 16)))[: len(numbers)]


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Nearest E4M3 numbers, ties to even, of values in [0, 448]."""
    mantissa, exponent = np.arange(127) & 7, np.arange(127) >> 3
    table = np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    values = values.astype(np.float64)
    high = np.clip(np.searchsorted(table, values), 1, 126)
    down, up = values - table[high - 1], table[high] - values
    code = np.where((down < up) | ((down == up) & (high % 2 == 1)), high - 1, high)
    return table[code].astype(F32)


def to_e2m1(scaled: np.ndarray, draws: np.ndarray | None = None) -> np.ndarray:
    """E2M1 codes of float32 values: nearest, ties to even; with a random byte each rounded down after adding it."""
    size = np.minimum(np.abs(np.nan_to_num(scaled, nan=0.0, posinf=6, neginf=-6)), F32(6)).astype(F32)
    if draws is None:
        code = np.zeros(size.shape, np.uint8)
        for number, middle in enumerate(_MIDPOINTS, 1):
            code[(size > middle) | ((size == middle) & (number % 2 == 0))] = number
    else:
        step = np.where(size < 2, F32(0.5), np.where(size < 4, F32(1), F32(2)))
        moved = size + (draws.astype(F32) / F32(256)) * step
        code = (np.searchsorted(VALUES, moved, side="right") - 1).astype(np.uint8)
    return code | (np.signbit(scaled) & ~np.isnan(scaled)).astype(np.uint8) << 3


def quantize(x: np.ndarray, rows: int, amax: float | None = None, draws: np.ndarray | None = None) -> Matrix:
    """x [M, K] float32 in blocks of rows x 16. ``amax``: the tensor's, where it is not x's own."""
    height, width = x.shape
    x = np.pad(x.astype(F32), ((0, -height % rows), (0, -width % 16)))
    size = np.where(np.isnan(x), F32(0), np.abs(x))
    total = F32(size.max(initial=0) if amax is None else amax)
    total = F32(2688) if np.isinf(total) else total
    with np.errstate(all="ignore"):
        encode = np.minimum(F32(2688) / total, _LARGEST_F32)
        encode = F32(1) if encode == 0 else encode
        decode = F32(1) / encode
        blocks = size.reshape(x.shape[0] // rows, rows, x.shape[1] // 16, 16).max((1, 3), initial=0)
        scales = to_e4m3(np.minimum(blocks * (encode * F32(1 / 6)), F32(448)))
        factors = np.minimum(F32(1) / (scales * decode), _LARGEST_F32)
        scaled = x * np.kron(factors, np.ones((rows, 16), F32))
    return Matrix(to_e2m1(scaled[:height], draws), scales, total, rows)


def transform(x: np.ndarray) -> np.ndarray:
    """The random Hadamard transform of x [M, K], zero-padded to whole blocks, rounded to bfloat16 (as float32)."""
    runs = np.pad(x.astype(F32), ((0, 0), (0, -x.shape[1] % 16))).reshape(len(x), -1, 16) * _SIGNS
    for stride in (8, 4, 2, 1):
        for first in [i for i in range(16) if not i & stride]:
            one, other = runs[..., first].copy(), runs[..., first + stride].copy()
            runs[..., first], runs[..., first + stride] = one + other, one - other
    bits = (runs * F32(0.25)).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(runs), F32(np.nan), rounded.astype(np.uint32).view(F32)).reshape(len(x), -1)


def draw(index: np.ndarray, key: tuple[int, int], counter: tuple[int, int]) -> np.ndarray:
    """The random byte of each logical element index: byte e mod 16 of the Philox block e // 16.

    Args:
        key: (seed, site); a columnwise side's site is the complement.
        counter: (iteration, microbatch).
    """
    blocks = {
        block: b"".join(
            word.to_bytes(4, "little")
            for word in philox4x32_10((block & 0xFFFFFFFF, block >> 32, *counter), key)
        )
        for block in set((index // 16).flatten().tolist())
    }
    return np.vectorize(lambda e: blocks[e // 16][e % 16], otypes=[np.uint8])(index)

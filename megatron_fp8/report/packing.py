"""Compact encoding of numbers for a page: rounded mantissas, deflated, base64.

A statistic is stored as the upper 24 bits of its float32. Special values have codes among the NaNs. If the
data exceed the size limit, mantissas are shortened first (deflate then compresses better), and after that
neighbouring iterations share a column.

Rejected: 8 bits between a map's smallest and largest value; one spike would take the precision of all other
values.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

NAN, NULL, ABSENT = 0x7FC000, 0x7FC001, 0x7FC002
"""Codes of NaN, null, and missing values. Infinities have float32's codes."""
BITS = (15, 11, 9, 7, 5, 4, 3)
"""Mantissa bits to try, most first; the relative error is at most about 2**-(bits + 1)."""
_LARGEST = np.float32(1.875 * 2.0**127)
"""The largest number with three mantissa bits; larger finite numbers are shown as this, not as Infinity."""


def packed(values: NDArray) -> str:
    """The array's bytes, little-endian, deflated (zlib format), in base64."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def codes_of(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    """Codes of numbers, rounded to nearest even. NaN becomes NAN; infinities stay; finite numbers stay finite."""
    finite = np.clip(values, -_LARGEST, _LARGEST)
    rounded = np.where(np.isinf(values), values, finite).astype(np.float32)
    return np.where(np.isnan(values), np.uint32(NAN), shortened(rounded.view(np.uint32), BITS[0]))


def values_of(codes: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Numbers from codes; NaN for NAN, NULL and ABSENT."""
    return (codes << np.uint32(8)).view(np.float32).astype(np.float64)


def shortened(bits: NDArray[np.uint32], mantissa: int) -> NDArray[np.uint32]:
    """Codes from float32 bits, rounded to ``mantissa`` bits; infinities and NaN keep their upper bits."""
    drop = np.uint32(23 - mantissa)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    even = (bits >> drop) & np.uint32(1)
    rounded = ((bits + half + even) >> drop) << drop
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    return np.where(special, bits, rounded) >> np.uint32(8)


def packed_map(codes: NDArray[np.uint32], mantissa: int) -> str:
    """Codes [sites, iterations] for the page, with mantissas rounded to ``mantissa`` bits; special codes are
    unchanged.

    Each code is stored as the difference to the previous one, modulo 2**24, since a site changes slowly. All
    high bytes come first, then the middle ones, then the low ones: deflate compresses similar bytes well.
    """
    cut = shortened(codes << np.uint32(8), mantissa)
    steps = np.diff(cut, axis=1, prepend=np.uint32(0))
    planes = np.stack([steps >> np.uint32(16), steps >> np.uint32(8), steps]) & np.uint32(0xFF)
    return packed(planes.astype(np.uint8))

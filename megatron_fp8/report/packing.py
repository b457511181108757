"""Numbers as text for a page: deflated, in base64; statistics in BF16 of as many bits as there is room for.

A statistic is looked at in 256 colours and read to two digits, so it is kept as BF16 is: float32's range, fewer bits of
mantissa. What is no number has a code of its own among the NaNs. Where a training had so many sites that it would not
fit, mantissas get shorter first (deflate then has less to keep), and neighbouring iterations share a column after that.
Rejected: 8 bits between a map's smallest and largest value; one spike would take the digits of everything else.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray

NAN, NULL, ABSENT = 0x7FC0, 0x7FC1, 0x7FC2
"""Codes: NaN; null, which was written as such; nothing was measured. Infinities are BF16's own."""
BITS = (7, 5, 4, 3)
"""Bits of mantissa, from what BF16 has down to the least; each is a relative error of at most 2**-(bits + 1)."""
_LARGEST = np.float32(1.875 * 2.0**127)
"""The largest number that has three bits of mantissa: what is beyond float32 is shown as this, and not as Infinity."""


def packed(values: NDArray) -> str:
    """The array's bytes, little-endian, deflated (zlib's format), in base64."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")


def codes_of(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """BF16 of numbers, rounded to nearest even; NaN is NAN, an infinity its own, a large number no infinity."""
    return shortened(_float32(values), BITS[0])


def _float32(values: NDArray[np.float64]) -> NDArray[np.uint32]:
    finite = np.clip(values, -_LARGEST, _LARGEST)
    chosen = np.where(np.isinf(values), values, finite).astype(np.float32)
    return chosen.view(np.uint32)


def shortened(bits: NDArray[np.uint32], mantissa: int) -> NDArray[np.uint16]:
    """float32's bits as BF16's, of which only the first ``mantissa`` bits of mantissa are used."""
    drop = np.uint32(23 - mantissa)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1)
    even = (bits >> drop) & np.uint32(1)
    rounded = ((bits + half + even) >> drop) << drop
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    kept = np.where(special, bits, rounded) >> np.uint32(16)
    nan = special & ((bits & np.uint32(0x007FFFFF)) != 0)
    return np.where(nan, np.uint32(NAN), kept).astype(np.uint16)


def packed_map(codes: NDArray[np.uint16], mantissa: int) -> str:
    """Codes [sites, iterations] for the page, their mantissas cut to ``mantissa`` bits; codes without number stay.

    Each is written as its difference to the one before, modulo 2**16, since a site changes little; all high bytes come
    first, then all low ones, each of which deflate finds alike.
    """
    special = (codes & np.uint16(0x7F80)) == 0x7F80
    cut = shortened(codes.astype(np.uint32) << np.uint32(16), mantissa)
    chosen = np.where(special, codes, cut)
    steps = np.diff(chosen, axis=1, prepend=np.uint16(0))
    planes = np.stack([steps >> np.uint16(8), steps & np.uint16(0xFF)]).astype(np.uint8)
    return packed(planes)

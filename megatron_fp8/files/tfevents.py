"""Records of TensorBoard's event files, with CRC-32C.

TensorBoard's own checksum takes 100 ns a byte in Python, this one 6.

The record is split into lanes of equal length, which NumPy processes together. Zeros pad its front: they do not change
a CRC that starts at zero. The CRC of two joined lanes is the first lane's CRC, advanced by the second lane's length,
xor the second's. Advancing is linear over bits, so its results for the 32 single bits define it. Rejected: a package
for it (google-crc32c), one more for every user to install, to save 25 ms of a measured iteration. Rejected:
TensorBoard's checksums in a thread: it would hold the interpreter's lock.
"""

from __future__ import annotations

import struct

import numpy as np
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import CRC_TABLE, masked_crc32c

_TABLE = np.array(CRC_TABLE, dtype=np.uint32)
_LANES = 1024
_BITS = np.arange(32, dtype=np.uint32)
_LONG = 2000
"""Lanes are faster from this many bytes."""


def framed(record: bytes) -> bytes:
    """A record in the file's format: its length and its bytes, each with a checksum."""
    length = struct.pack("<Q", len(record))
    return length + _checksum(length) + record + _checksum(record)


def _checksum(data: bytes) -> bytes:
    if len(data) < _LONG:
        return struct.pack("<I", masked_crc32c(data))
    crc = crc32c(data)  # masked, since a CRC over data that contains CRCs is weak
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def crc32c(record: bytes) -> int:
    """CRC-32C of a record of at least four bytes."""
    width = -(-len(record) // _LANES)
    padded = np.zeros(_LANES * width, dtype=np.uint8)
    padded[padded.size - len(record) :] = np.frombuffer(record, dtype=np.uint8)
    padded[padded.size - len(record) :][:4] ^= 0xFF  # a CRC starts with ones
    columns = np.zeros((width, _LANES + 32), dtype=np.uint8)
    columns[:, :_LANES] = padded.reshape(_LANES, width).T
    # The last 32 lanes get zeros only, and start with one bit each: their results advance any CRC by `width`.
    state = np.concatenate([np.zeros(_LANES, dtype=np.uint32), np.uint32(1) << _BITS])
    for column in columns:
        state = _TABLE[(state ^ column) & 0xFF] ^ (state >> 8)
    lanes, bit_results = state[:_LANES], state[_LANES:]
    while lanes.size > 1:
        lanes, bit_results = (
            _advance(lanes[0::2], bit_results) ^ lanes[1::2],
            _advance(bit_results, bit_results),
        )
    return int(lanes[0]) ^ 0xFFFFFFFF


def _advance(state: np.ndarray, bit_results: np.ndarray) -> np.ndarray:
    """Advance CRCs [n] by a length; ``bit_results`` [32]: the result for each single bit."""
    bits = (state[:, None] >> _BITS) & 1
    return np.bitwise_xor.reduce(bits * bit_results, axis=1)

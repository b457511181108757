"""Numbers as BF16 codes: torch's own BF16, fewer bits where room is short, and codes for what is no number."""

import base64
import zlib

import numpy as np
import torch

from megatron_fp8.report.packing import ABSENT, BITS, NAN, NULL, codes_of, packed_map, shortened


def test_codes_are_torchs_bfloat16():
    values = np.random.default_rng(0).standard_normal(2000) * 10.0 ** np.arange(-40, 40).repeat(25)
    finite = values[np.abs(values) < 3e38]
    want = torch.tensor(finite, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (codes_of(finite) == want).all()


def test_what_is_no_number_has_its_own_code_and_what_is_large_is_no_infinity():
    codes = codes_of(np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0]))
    assert codes[:3].tolist() == [NAN, 0x7F80, 0xFF80] and codes[5] == 0
    kept = [shortened(codes.astype(np.uint32) << np.uint32(16), bits)[3:5] for bits in BITS]
    assert all(((k & 0x7F80) != 0x7F80).all() for k in kept)


def unpacked(text, shape):
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8).reshape(2, *shape)
    steps = planes[0].astype(np.uint16) << 8 | planes[1]
    return np.cumsum(steps, axis=1, dtype=np.uint16)


def test_a_map_comes_back_with_the_bits_that_were_kept():
    values = np.random.default_rng(1).lognormal(0, 3, (5, 7))
    codes = codes_of(values)
    codes[0, :4] = NAN, NULL, ABSENT, 0xFF80
    for bits in BITS:
        back = unpacked(packed_map(codes, bits), codes.shape)
        assert (back[0, :4] == codes[0, :4]).all()
        read = (back.astype(np.uint32) << np.uint32(16)).view(np.float32)
        error = np.abs(read / values - 1).reshape(-1)[4:]
        assert error.max() <= 2.0 ** -(bits + 1) + 2.0**-8
        assert len(np.unique(back.reshape(-1)[4:] & 0x7F)) <= 2**bits

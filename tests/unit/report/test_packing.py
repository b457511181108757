"""Numbers as codes: the upper bits of float32, fewer where room is short, and codes for what is no number."""

import base64
import zlib

import numpy as np
import torch

from megatron_fp8.report.heatmaps import (
    ABSENT,
    BITS,
    NAN,
    NULL,
    codes_of,
    encode_map,
    round_mantissas,
    values_of,
)


def test_seven_bits_are_torchs_bfloat16():
    values = np.random.default_rng(0).standard_normal(2000) * 10.0 ** np.arange(-40, 40).repeat(25)
    finite = values[np.abs(values) < 3e38].astype(np.float32)
    want = torch.tensor(finite).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (round_mantissas(finite.view(np.uint32), 7) == want.astype(np.uint32) << 8).all()


def test_what_is_no_number_has_its_own_code_and_what_is_large_is_no_infinity():
    codes = codes_of(np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0]))
    assert codes[:3].tolist() == [NAN, 0x7F8000, 0xFF8000] and codes[5] == 0
    assert np.isfinite(values_of(codes)).tolist() == [False] * 3 + [True] * 3
    for bits in BITS:
        assert np.isfinite(values_of(round_mantissas(codes << np.uint32(8), bits))[3:5]).all()


def unpacked(text, shape):
    planes = (
        np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
        .reshape(3, *shape)
        .astype(np.uint32)
    )
    steps = planes[0] << 16 | planes[1] << 8 | planes[2]
    return np.cumsum(steps, axis=1, dtype=np.uint32) & 0xFFFFFF


def test_a_map_comes_back_with_the_bits_that_were_kept():
    values = np.random.default_rng(1).lognormal(0, 3, (5, 7))
    codes = codes_of(values)
    codes[0, :4] = NAN, NULL, ABSENT, 0xFF8000
    for bits in BITS:
        back = unpacked(encode_map(codes, bits), codes.shape)
        assert (back[0, :4] == codes[0, :4]).all()
        error = np.abs(values_of(back) / values - 1).reshape(-1)[4:]
        assert error.max() <= 2.0 ** -(bits + 1) + 2.0**-15
        assert not (back.reshape(-1)[4:] & ((1 << (15 - bits)) - 1)).any()

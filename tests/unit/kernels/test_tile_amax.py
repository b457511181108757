"""Amaxes of pairs: what the kernels compute interpreted, and what their instructions compute by NVIDIA's description."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from megatron_fp8.kernels import tile_amax, tiles
from tests.support.matrices import DEVICE

INF = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
EVERY = np.arange(65536, dtype=np.uint32)


@triton.jit
def find(x, row_bits, col_bits, largest, count, NAN: tl.constexpr):
    row, col = tiles.rows_of(128), tl.arange(0, 64)
    tile = tl.load(x + row[:, None] * 64 + col[None, :])
    at = row[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(row_bits + at, tile_amax.row_amax_bits(tile, 32, NAN))
    tl.store(col_bits + tl.arange(0, 4)[:, None] * 64 + col[None, :], tile_amax.col_amax_bits(tile, 32, NAN))
    tl.store(largest, tile_amax.tile_amax_bits(tile, NAN))
    tl.store(count, tile_amax.nonfinite_in(tile))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_number(dtype):
    """All patterns of 16 bits, a tile at a time: each is the largest of its blocks somewhere, NaN and Inf among them."""
    patterns = torch.from_numpy(EVERY.astype(np.int32)).to(torch.int16).view(8, 128, 64)
    turned = patterns.roll(1, 0).transpose(1, 2).reshape(8, 128, 64)
    for bits in (*patterns, *turned):
        x = (bits.view(torch.bfloat16).float() if dtype == torch.float32 else bits.view(dtype)).to(DEVICE)
        wide = x.float().abs()
        for nan in (True, False):
            rows, cols = (torch.empty(s, dtype=torch.int32, device=DEVICE) for s in ((128, 2), (4, 64)))
            largest, count = (torch.empty((), dtype=torch.int32, device=DEVICE) for _ in range(2))
            find[(1,)](x, rows, cols, largest, count, nan)
            for found, dims, blocks in (
                (rows, 2, wide.view(128, 2, 32)),
                (cols, 1, wide.view(4, 32, 64)),
                (largest, 0, wide.flatten()),
            ):
                has_nan = blocks.isnan().any(dims)
                expected = torch.where(blocks.isnan(), 0.0, blocks).amax(dims)
                value = found.view(torch.float32)
                assert torch.equal(value.isnan(), has_nan if nan else torch.zeros_like(has_nan))
                assert torch.equal(value[~value.isnan()], expected[~value.isnan()])
            assert int(count) == int((~x.isfinite()).sum())


def ptx_max(a: np.ndarray, b: np.ndarray, inf: int, nan: bool) -> np.ndarray:
    """max{.NaN}.xorsign.abs of one half of a pair, as PTX describes it; subnormals are kept, as without .ftz."""
    magnitudes = a & 0x7FFF, b & 0x7FFF
    is_nan = [m > inf for m in magnitudes]
    sign = (a ^ b) & 0x8000
    larger = np.maximum(*magnitudes) | sign
    either = np.where(is_nan[0], magnitudes[1] | sign, np.where(is_nan[1], magnitudes[0] | sign, larger))
    if nan:
        return np.where(is_nan[0] | is_nan[1], 0x7FFF, larger)
    return np.where(is_nan[0] & is_nan[1], 0x7FFF, either)


@pytest.mark.parametrize("dtype", INF, ids=str)
def test_the_instruction_gives_the_same(dtype):
    """Each number against numbers of every kind, in both places, and the result against a third (a reduction)."""
    inf = INF[dtype]
    kinds = [
        0,
        0x8000,
        1,
        0x8001,
        0x007F,
        0x0080,
        0x3F80,
        0xBF81,
        inf - 1,
        inf,
        inf | 0x8000,
        inf + 1,
        0x7FFF,
        0xFFFF,
    ]
    others = [np.full_like(EVERY, kind) for kind in kinds] + [EVERY ^ 1, EVERY ^ 0x8000, EVERY[::-1].copy()]
    for other in others:
        for third in (0x8000, 0x3F80, 0x7FFF):
            trio = [EVERY, other, np.full_like(EVERY, third)]
            magnitudes = np.stack([t & 0x7FFF for t in trio])
            for nan in (True, False):
                for a, b in ((EVERY, other), (other, EVERY)):
                    found = ptx_max(ptx_max(a, b, inf, nan), trio[2], inf, nan) & 0x7FFF
                    if (
                        nan
                    ):  # as integers NaN is the largest too, and all that is asked is whether there is one
                        wanted = magnitudes.max(0)
                        assert ((found > inf) == (wanted > inf)).all()
                        assert (found == wanted)[wanted <= inf].all()
                    else:
                        numbers = np.where(magnitudes > inf, 0, magnitudes).max(0)
                        assert (np.where(found > inf, 0, found) == numbers).all()

"""Scales in the tiles that Blackwell's product reads, against the index formula and the values of the scales."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.backends.native.layout import swizzle
from megatron_fp8.kernels.mx_scales import tile_scales
from megatron_fp8.recipe import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128
from megatron_fp8.tensor import QuantizedSide, expand_scale
from tests.support.matrices import DEVICE
from tests.support.scaled_mm import unswizzle

SIZES = ((1, 1), (33, 129), (128, 128), (130, 700))


def exponents(rows: int, cols: int) -> torch.Tensor:
    """All of a scale's bytes but NaN, in turn."""
    return (torch.arange(rows * cols).view(rows, cols) * 7 % 255).to(torch.uint8)


@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_exponents(rows: int, cols: int) -> None:
    """However they lie."""
    known = exponents(rows, -(-cols // 32))
    for scale in (known, known.t().contiguous().t()):
        found = tile_scales(scale.view(torch.float8_e8m0fnu).to(DEVICE), rows, cols).cpu()
        assert torch.equal(
            found.view(torch.uint8), swizzle(known.view(torch.float8_e8m0fnu)).view(torch.uint8)
        )


@pytest.mark.parametrize("granularity", [BLOCK_1X128, BLOCK_128X128], ids=str)
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_powers_of_two_of_wider_blocks(rows: int, cols: int, granularity) -> None:
    """Every element's scale is what it was: all that a float32 scale_inv can be, 2^-127 to 2^126, and 2^127."""
    known = exponents(-(-rows // granularity.rows), -(-cols // 128)).double() - 127
    scale = known.exp2().float()
    padded = torch.nn.functional.pad(scale, (0, 3))[:, : scale.shape[1]]
    for lies in (scale, scale.t().contiguous().t(), padded):
        found = tile_scales(lies.to(DEVICE), rows, cols, height=granularity.rows, width=128).cpu()
        values = unswizzle(found, rows, cols)
        assert torch.equal(values, expand_scale(scale.double(), granularity, (rows, cols)))


def test_what_is_no_number_stays_none() -> None:
    scale = torch.tensor([[float("nan"), float("inf"), -float("nan"), 1.0]], device=DEVICE)
    found = tile_scales(scale, 1, 512, width=128).cpu().view(torch.uint8)
    assert [found[512 * i].item() for i in range(4)] == [255, 255, 255, 127]


def test_tiles_are_undone() -> None:
    for rows, cols in SIZES:
        known = exponents(rows, -(-cols // 32)).view(torch.float8_e8m0fnu)
        codes = torch.zeros(rows, cols, dtype=torch.float8_e4m3fn)
        plain = QuantizedSide(codes, known, BLOCK_1X32, True)
        tiled = QuantizedSide(
            codes, tile_scales(known.to(DEVICE), rows, cols).cpu(), BLOCK_1X32, True, tiled=True
        )
        assert torch.equal(tiled.plain().scale_inv.view(torch.uint8), known.view(torch.uint8))
        assert plain.plain() is plain and not tiled.plain().tiled
        assert torch.equal(tiled.dequantize(), plain.dequantize())
        assert torch.equal(tiled.float_scale_inv(), plain.float_scale_inv())

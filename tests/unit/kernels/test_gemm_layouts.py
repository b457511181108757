"""Codes transposed; scales in the tiles that Blackwell's product reads, by the index formula."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends.native.placement import swizzle
from megatron_fp8.kernels.gemm_layouts import tile_scales, transpose
from megatron_fp8.recipe import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128
from megatron_fp8.tensor import QuantizedSide, expand_scale
from tests.support.matrices import DEVICE
from tests.support.scaled_mm import unswizzle

SHAPES = [(1, 1), (1, 200), (7, 33), (129, 128), (300, 17), (0, 4), (4, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transpose(shape):
    codes = (
        torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8).to(DEVICE)
    )
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2):
        turned = transpose(codes.view(dtype))
        assert turned.dtype == dtype and turned.is_contiguous()
        assert_same_bytes(turned, codes.t(), f"{shape}")


def test_strided():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16).to(DEVICE)
    assert_same_bytes(transpose(codes[3:, 2:9]), codes[3:, 2:9].t(), "rows apart")
    assert_same_bytes(transpose(codes.t()), codes, "columns apart")


def test_errors():
    with pytest.raises(ValueError, match=r"one-byte codes, got torch.bfloat16 \(2, 2\)"):
        transpose(torch.zeros(2, 2, dtype=torch.bfloat16, device=DEVICE))


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

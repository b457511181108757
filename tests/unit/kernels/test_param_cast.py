"""Pieces of a float32 master, cut anywhere: together they give the codes of the whole rounded weight."""

from itertools import pairwise

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.kernels.param_cast import piece_amax, piece_cast
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.scaling import compute_scale
from megatron_fp8.recipe import BLOCK_128X128, TENSOR, Rule
from tests.support.matrices import DEVICE, mixed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("granularity", [TENSOR, BLOCK_128X128], ids=str)
@pytest.mark.parametrize("special", [False, True], ids=["finite", "nonfinite"])
def test_pieces(granularity, dtype, special):
    shape = (200, 150)
    master = mixed(shape, torch.float32, special).flatten()
    master[70] = 1.00390625  # a tie between two bfloat16 numbers
    expected = emulated.quantize(master.view(shape).to(dtype), Rule(E4M3, granularity, "pow2"), "rowwise")
    side = expected.tensor.rowwise
    amax = torch.zeros([] if granularity.is_tensor else [2, 2], device=DEVICE)
    nonfinite = torch.zeros([], device=DEVICE)
    codes = torch.full((master.numel(),), 0xEE, dtype=torch.uint8, device=DEVICE)
    cuts = [0, 0, 1, 130, 149, 150 * 128 - 3, 150 * 128 + 140, 30_000]
    pieces = list(pairwise(cuts))
    for start, stop in pieces:
        piece_amax(master[start:stop].clone(), start, shape, dtype, amax, nonfinite)
    assert float(amax.max()) == float(expected.amax)
    assert int(nonfinite) == int(expected.nonfinite or 0)
    scale = compute_scale(amax, E4M3, pow2=True)
    for start, stop in pieces:
        part = codes[start:stop].clone()
        piece_cast(master[start:stop].clone(), start, shape, dtype, scale, part, E4M3)
        codes[start:stop] = part
    assert_same_bytes(codes.view(shape), side.codes.view(torch.uint8), str(granularity))
    assert_same_bytes(1 / scale, side.scale_inv, "scales")

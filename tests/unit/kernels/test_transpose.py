"""Codes turned around, whatever their size and strides."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels.fp8_transpose import transpose
from tests.support.matrices import DEVICE

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

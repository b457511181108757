"""A static scale is what codes are made by, on GPUs as elsewhere."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron_fp8.backends import emulated
from megatron_fp8.inference.static_scales import StaticScale
from megatron_fp8.kernels.cpu import fp4 as cpu_fp4
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.numerics import nvfp4
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.recipe import NVFP4BlockScaling
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.native_casts import native_casts_on_cpu
from tests.support.sites import RECIPES


@pytest.mark.parametrize("backend", ["native", "emulated"])
def test_another_scale_gives_other_codes(backend: str) -> None:
    """Under 2^-20 all values are zeros."""
    x, weight = (torch.ones(32, 64, dtype=torch.bfloat16) for _ in range(2))
    results = []
    with native_casts_on_cpu(), torch.no_grad():
        for scale in (1.0, 2.0**-20):
            site = GemmSite(fp8_site("a", 0, RECIPES["tensorwise"], backend, "test"), Fp8State(), None)
            StaticScale(torch.tensor(scale, dtype=torch.float32))(site)
            results.append(fp8_linear(x, weight, None, site, training=False).float().unique().tolist())
    assert results == [[64.0], [0.0]]


def test_nvfp4_takes_the_tensors_amax_and_derives_the_blocks_scales() -> None:
    """The blocks' scales follow from the static amax, in C and in torch; what is above it saturates, and no row changes
    another."""
    rule = NVFP4BlockScaling().rule("input")
    assert rule is not None
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 3
    amax = torch.tensor(4.0)
    for compiled in (True, False):
        with mock.patch.object(cpu_fp4, "takes", return_value=compiled):
            side = emulated.quantize(x, rule, "rowwise", scale=amax).tensor.rowwise
        assert side is not None and side.tensor_amax is not None and float(side.tensor_amax) == 4.0
        blocks = x.view(5, 4, 16).abs().amax(-1)
        assert torch.equal(side.scale_inv.float(), nvfp4.block_scales(blocks, amax).float())
        values = side.dequantize()
        assert float(values.abs().max()) <= 4.0 < float(x.abs().max())
        inside = (blocks <= 4).repeat_interleave(16, 1).view(5, 64)
        assert float((values - x)[inside].abs().max()) < 1.0

"""A static scale is what codes are made by, on GPUs as elsewhere."""

from __future__ import annotations

import pytest
import torch

from megatron_fp8.inference.activations import StaticScale
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.site_plan import fp8_site
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

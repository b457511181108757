"""A GEMM site: quantizers and slots from its plan, three GEMMs counted, a stream of random bits a backward."""

from __future__ import annotations

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.site_plan import bf16_site
from megatron_fp8.quantizer import CastJob, cast_each
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.tensor import Sides
from tests.support.products import assert_close_to_exact, values
from tests.support.sites import ALL_RECIPES, RECIPES, make_site, randn

ROLES = ("input", "weight", "grad_output")


@pytest.mark.parametrize("name", ALL_RECIPES)
def test_one_slot_for_each_quantized_role(name):
    state, recipe = Fp8State(), ALL_RECIPES[name]
    site, _ = make_site(name, state=state, name="decoder.layers.3.mlp.linear_fc1")
    roles = [role for role in ROLES if recipe.rule(role) is not None]
    assert [slot.name for slot in state.slots()] == [
        f"decoder.layers.3.mlp.linear_fc1.{role}" for role in roles
    ]
    for role in ROLES:
        quantizer = site.quantizers[role]
        assert (quantizer is not None) == (role in roles)
        if quantizer is not None:
            assert quantizer.rule == recipe.rule(role) and quantizer.slot.fmt is quantizer.rule.fmt
            assert quantizer.slot.delayed == (recipe if isinstance(recipe, DelayedScaling) else None)
    assert site.is_fp8


def test_bf16_site_has_neither_slots_nor_quantizers():
    state = Fp8State()
    site = GemmSite(bf16_site("output_layer", None, "not a layer's linear"), state, None)
    assert not site.is_fp8 and state.slots() == [] and set(site.quantizers.values()) == {None}
    x, w = randn(5, 7, seed=1), randn(3, 7, seed=2)
    sides = site.weights.prepare(w, fresh=True, training=True, record=True)
    assert isinstance(sides, Sides) and sides.rowwise is w
    assert_same_bytes(sides.columnwise, w.t())
    assert_close_to_exact(site.multiply("fprop", x, w, torch.bfloat16), x.double(), w.double())
    assert (state.counts.fp8_gemms, state.counts.hp_gemms, state.counts.casts) == (0, 1, 0)


def test_high_precision_gemm_dequantizes_the_other_operand():
    site, backend = make_site("no-weight")
    x, w = randn(40, 64, seed=1), randn(24, 64, seed=2)
    side = quantize(x, ALL_RECIPES["no-weight"], "input").rowwise
    bias = randn(24, seed=3)
    assert side is not None
    y = site.multiply("fprop", side, w, torch.bfloat16)
    assert_close_to_exact(y, side.dequantize(torch.bfloat16).double(), w.double())
    with_bias = site.multiply("fprop", side, w, torch.float32, bias)
    assert_close_to_exact(with_bias, side.dequantize(torch.bfloat16).double(), w.double(), bias)
    assert not backend.products and site.state.counts.hp_gemms == 2


def test_fp8_gemm_is_the_backends():
    site, backend = make_site("mxfp8")
    x, w = randn(40, 64, seed=1), randn(24, 64, seed=2)
    a, b = quantize(x, RECIPES["mxfp8"], "input").rowwise, quantize(w, RECIPES["mxfp8"], "weight").rowwise
    assert a is not None and b is not None
    y = site.multiply("fprop", a, b, torch.float32)
    assert backend.products[0].result is y and site.state.counts.fp8_gemms == 1
    assert_close_to_exact(y, values(a), values(b))
    with pytest.raises(AssertionError):
        site.multiply("fprop", x, w, torch.float32)


def test_sites_of_one_state_share_its_counts():
    state = Fp8State()
    sites = [make_site(name, state=state, name=name)[0] for name in ("mxfp8", "delayed")]
    w = randn(8, 8, seed=1)
    for site in sites:
        job = site.weights.prepare(w, fresh=True, training=True, record=True)
        assert isinstance(job, CastJob)
        cast_each([job])
    assert state.finish_iteration().casts == 2
    assert len(state.arenas) == 1 and len(state.slots()) == 6

"""A GEMM site: quantizers and slots from its plan, three GEMMs counted, a stream of random bits a backward."""

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.site_plan import bf16_site
from megatron_fp8.quantizer import cast_each
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.tensor import Sides
from tests.support.products import assert_close_to_exact
from tests.support.sites import ALL_RECIPES, make_site, randn

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


def test_sites_of_one_state_share_its_counts():
    state = Fp8State()
    sites = [make_site(name, state=state, name=name)[0] for name in ("mxfp8", "delayed")]
    w = randn(8, 8, seed=1)
    for site in sites:
        jobs = site.weights.prepare(w, fresh=True, training=True, record=True)
        assert isinstance(jobs, list)
        cast_each(jobs)
    assert state.finish_iteration().casts == 2
    assert len(state.arenas) == 1 and len(state.slots()) == 6

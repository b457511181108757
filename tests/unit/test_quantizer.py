"""The quantizer that a site keeps for a role: whose scale it takes, what it records, what it passes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.backends import emulated
from megatron_fp8.backends.base import Region
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.quantizer import Quantizer
from megatron_fp8.recipe import CustomRecipe, Float8RowwiseScaling, MXFP8BlockScaling
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import RECIPES, RecordingBackend, randn

ROLES = ("input", "weight", "grad_output")


def make(recipe: Any, role: str = "input") -> tuple[Quantizer, Fp8State]:
    state = Fp8State()
    rule = recipe.rule(role)
    slot = state.arena(None).add(recipe if rule.delayed else None, rule.fmt)
    return Quantizer(rule, slot, RecordingBackend()), state  # type: ignore[arg-type]


def assert_same_side(actual: Any, expected: Any, what: str) -> None:
    assert (actual is None) == (expected is None), what
    if actual is not None:
        assert actual.codes.dtype == expected.codes.dtype
        assert_same_bytes(actual.codes, expected.codes, f"{what} codes")
        assert_same_bytes(actual.scale_inv, expected.scale_inv, f"{what} scale_inv")


@pytest.mark.parametrize("direction", ["rowwise", "columnwise", "both"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", RECIPES)
def test_cold_quantizer_is_quantize(name, role, direction):
    x = randn(40, 50, seed=1)
    quantizer, _ = make(RECIPES[name], role)
    actual, expected = quantizer(x, direction, record=True), quantize(x, RECIPES[name], role, direction)
    assert_same_side(actual.rowwise, expected.rowwise, "rowwise")
    assert_same_side(actual.columnwise, expected.columnwise, "columnwise")
    assert actual.dtype == torch.bfloat16


@pytest.mark.parametrize("name", RECIPES)
def test_records_amax_nonfinite_and_casts(name):
    quantizer, state = make(RECIPES[name])
    x = randn(40, 50, seed=1)
    quantizer(x / 2, "both", record=True)
    quantizer(x, "rowwise", record=True)
    x[0, 0], x[1, 1] = torch.nan, torch.nan
    quantizer(x, "columnwise", record=True)
    quantizer(x * 100, "both", record=False)
    arena = state.arenas[0]
    assert arena.rows[:, 0].tolist() == [x.nan_to_num().float().abs().max(), 2]
    assert state.counts.casts == 4


def test_only_a_warm_delayed_scale_comes_from_the_history():
    x = randn(40, 50, seed=1)
    for name in RECIPES:
        quantizer, state = make(RECIPES[name])
        quantizer(x * 4, "both", record=True)
        state.finish_iteration()
        now = quantizer(x, "both", record=True)
        own = quantize(x, RECIPES[name], "input", "both")
        assert torch.equal(now.rowwise.scale_inv, own.rowwise.scale_inv) == (name != "delayed"), name
    by_history = emulated.quantize(x, RECIPES["delayed"].rule("input"), "both", scale=_scale(x * 4)).tensor
    quantizer, state = make(RECIPES["delayed"])
    quantizer(x * 4, "both", record=True)
    state.finish_iteration()
    assert_same_side(quantizer(x, "both", record=True).rowwise, by_history.rowwise, "warm")


def _scale(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(448.0) / x.float().abs().max()


def test_amax_reduction_is_asked_for_where_shards_are_cut():
    """Per tensor: once, unless a delayed scale is shared already. Per row: along the tokens. Blocks: never."""
    x = randn(40, 50, seed=1)
    calls: list[tuple[int, ...]] = []

    def reduce(amax: torch.Tensor) -> None:
        calls.append(tuple(amax.shape))
        amax.mul_(2)

    per_tensor = ("delayed", "tensorwise", "tensorwise-pow2")
    for name in RECIPES:
        calls.clear()
        quantizer, state = make(RECIPES[name])
        shared = quantizer(x, "both", record=True, reduce_amax=reduce)
        own = quantize(x, RECIPES[name], "input", "both")
        if name == "rowwise":
            assert [max(shape) for shape in calls] == [50]
            assert torch.equal(shared.columnwise.scale_inv, own.columnwise.scale_inv * 2)
            assert torch.equal(shared.rowwise.scale_inv, own.rowwise.scale_inv)
        elif name == "nvfp4":  # the tensor's amax in each direction
            assert calls == [(2,)]
            for mine, alone in zip(shared.sides, own.sides, strict=True):
                assert torch.equal(mine.tensor_amax, alone.tensor_amax * 2)
        else:
            assert calls == [()] * (name in per_tensor), name
            assert torch.equal(
                shared.rowwise.float_scale_inv(), own.rowwise.float_scale_inv() * 2 ** len(calls)
            )
        assert state.arenas[0].rows[0, 0] == x.float().abs().max(), "what is recorded is the shard's own"
    quantizer, state = make(RECIPES["delayed"])
    quantizer(x, "both", record=True)
    state.finish_iteration()
    calls.clear()
    quantizer(x, "both", record=True, reduce_amax=reduce)
    assert calls == []


def test_region_reaches_stochastic_rules_only():
    region = Region(RandomKey(7))
    x = randn(40, 64, seed=1)
    plain = quantize(x, MXFP8BlockScaling(), "grad_output")
    recipe = replace(MXFP8BlockScaling(), stochastic_rounding=True)
    nearest = make(MXFP8BlockScaling(), "grad_output")[0](x, "rowwise", record=True, region=region)
    chance = make(recipe, "grad_output")[0](x, "rowwise", record=True, region=region)
    assert_same_side(nearest.rowwise, plain.rowwise, "nearest")
    assert_same_side(
        chance.rowwise, quantize(x, recipe, "grad_output", key=RandomKey(7)).rowwise, "stochastic"
    )
    assert not torch.equal(chance.rowwise.codes.view(torch.uint8), plain.rowwise.codes.view(torch.uint8))


def test_quantize_says_what_it_cannot_do():
    x = torch.ones(2, 2)
    custom = CustomRecipe(lambda role: None if role == "weight" else Float8RowwiseScaling())
    with pytest.raises(ValueError, match="leaves 'weight' in high precision"):
        quantize(x, custom, "weight")
    with pytest.raises(ValueError, match="pass key=RandomKey"):
        quantize(x, Float8RowwiseScaling(stochastic_rounding=True), "grad_output")
    with pytest.raises(ValueError, match="role 'activation'"):
        quantize(x, Float8RowwiseScaling(), "activation")


def test_a_quantizer_that_casts_in_a_way_of_its_own():
    """A subclass's own ``request`` makes each cast."""

    class Doubled(Quantizer):
        def request(self, job: Any) -> Any:
            return super().request(job._replace(x=job.x * 2))

    rule = RECIPES["tensorwise"].rule("input")
    slot = Fp8State().arena(None).add(None, rule.fmt)
    doubled = Doubled(rule, slot, emulated)
    for seed in (1, 2, 3):
        x = randn(40, 50, seed=seed)
        expected = quantize(x * 2, RECIPES["tensorwise"], "input", "both")
        made = doubled(x, "both", record=True)
        assert_same_side(made.rowwise, expected.rowwise, "rowwise")
        assert torch.equal(made.rowwise.scale_inv, expected.rowwise.scale_inv)

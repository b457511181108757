"""The quantized weight of a site: cached until somebody may have written the weight, recorded once an iteration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.linear.weight_cache import WeightCache, columnwise_of, stamp_of
from megatron_fp8.quantizer import CastJob, cast_each
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.tensor import Sides
from tests.support.sites import ALL_RECIPES, make_site, randn


def made(name: str = "delayed", **options: bool) -> tuple[WeightCache, Fp8State, torch.Tensor]:
    state = Fp8State(**options)
    return make_site(name, state=state)[0].weights, state, randn(24, 40, seed=1)


def quantized(cache: WeightCache, w: torch.Tensor, *, fresh: bool = False, record: bool = True) -> Sides:
    """As a forward does."""
    ready = cache.prepare(w, fresh=fresh, training=True, record=record)
    return cache.take(ready, *cast_each([ready])) if isinstance(ready, CastJob) else ready


def codes(cache: WeightCache, w: torch.Tensor, **options: bool) -> Any:
    return quantized(cache, w, **options).rowwise


def test_it_is_quantized_once_until_somebody_wrote_it():
    cache, state, w = made()
    first = codes(cache, w)
    assert codes(cache, w) is first and state.counts.casts == 1
    assert codes(cache, w, fresh=True) is not first
    for write in (
        lambda: w.mul_(2),
        lambda: setattr(state, "weight_generation", state.weight_generation + 1),
        cache.forget,
    ):
        before = codes(cache, w)
        write()
        assert codes(cache, w) is not before
    assert codes(cache, w.clone()) is not codes(cache, w)


def test_nothing_serves_twice_where_weights_are_not_kept():
    cache, state, w = made(keeps_weights=False)
    assert codes(cache, w) is not codes(cache, w)
    assert state.counts.casts == 2


def test_training_records_what_evaluation_quantized():
    cache, state, w = made()
    evaluated = codes(cache, w, record=False)
    assert not state.arenas[0].rows.any()
    assert codes(cache, w) is evaluated and state.counts.casts == 1
    assert float(state.arenas[0].rows[0].max()) == float(w.abs().max())


@pytest.mark.parametrize("name", ["delayed", "blockwise", "no-weight"])
def test_backward_gets_the_forwards_codes_also_from_a_copy_and_after_an_update(name):
    cache, state, w = made(name)
    for _ in range(2):  # the second has a delayed scale
        forward = quantized(cache, w)
        expected = forward.columnwise
        stamp, scale = stamp_of(cache, w.device, training=True)
        kept = columnwise_of(cache, w, stamp, scale)
        state.finish_iteration()
        for found in (kept, columnwise_of(cache, w.clone(), stamp, scale)):
            if isinstance(found, torch.Tensor):
                assert_same_bytes(found, expected)
            else:
                assert_same_bytes(found.codes, expected.codes)
                assert_same_bytes(found.scale_inv, expected.scale_inv)
    assert (ALL_RECIPES[name].rule("weight") is None) == (forward.rowwise is w)


def test_it_is_observed_once_an_iteration_and_not_cast():
    cache, state, w = made()
    cache.observe(w)
    cache.observe(4 * w)
    assert float(state.arenas[0].rows[0].max()) == float(w.abs().max()) and state.counts.casts == 0
    state.finish_iteration()
    cache.observe(4 * w)
    assert float(state.arenas[0].rows[0].max()) == 4 * float(w.abs().max())

"""Random bits of stochastic rounding: a stream of its own for each backward, and the same again in a resumed run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import RECIPES, make_site


def test_each_backward_has_its_own_random_stream():
    """Named by seed, site, iteration, data-parallel rank and which backward of the iteration it is."""
    state = Fp8State()
    site, _ = make_site("mxfp8", state=state, seed=3)

    def key(site: GemmSite = site):
        return site.next_region(0, 0, 0).key

    keys = [key(), key()]
    state.iteration += 1
    keys += [key(), key()]
    assert len(set(keys)) == 4
    again, _ = make_site("mxfp8", seed=3)
    assert [key(again), key(again)] == keys[:2]
    again.state.iteration += 1
    assert [key(again), key(again)] == keys[2:], "an iteration starts from its first stream"
    for other in ({"seed": 4}, {"seed": 3, "stream": 1}, {"seed": 3, "name": "layers.1.linear"}):
        assert key(make_site("mxfp8", **other)[0]) != keys[0], other


def test_region_tells_where_the_matrix_lies():
    region = make_site("mxfp8")[0].next_region(4, 6, 12)
    index = region.index(2, 3, torch.device("cpu"))
    assert index.tolist() == [[54, 55, 56], [66, 67, 68]]


def test_a_captured_graph_would_repeat_its_bits():
    state = Fp8State()
    rounded, _ = make_site(replace(RECIPES["mxfp8"], stochastic_rounding=True), state=state)
    plain, _ = make_site("mxfp8", state=state)
    state.begin_capture()
    plain.next_region(0, 0, 0)
    with pytest.raises(RuntimeError, match="a CUDA graph would repeat them"):
        rounded.next_region(0, 0, 0)

"""Random bits of stochastic rounding: where the matrix lies in its stream, and no capture that would repeat them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import RECIPES, make_site


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

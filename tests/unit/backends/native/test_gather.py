"""Gathering the tokens of a columnwise side, as the emulated backend lays it out (a view) and as the native one does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.ranks import RankPool
from megatron_fp8 import quantize
from megatron_fp8.linear.tensor_parallel import TensorParallel
from megatron_fp8.tensor import QuantizedSide
from tests.support.sites import NATIVE_RECIPES as RECIPES
from tests.support.sites import randn

TOKENS, FEATURES = 256, 96


def as_native(side: QuantizedSide) -> QuantizedSide:
    """The columnwise side as kernels.quantize writes it: contiguous codes, 1-wide block scales with rows contiguous."""
    scale = side.scale_inv
    if side.granularity.rows == 1 and side.granularity.cols == 128:
        scale = scale.t().contiguous().t()
    elif scale.ndim:
        scale = scale.contiguous()
    return replace(side, codes=side.codes.contiguous(), scale_inv=scale)


def gathers(names: list[str], async_op: bool) -> None:
    tp = TensorParallel.of("row", dist.group.WORLD, sequence_parallel=True)
    for name in names:
        whole = randn(TOKENS, FEATURES, seed=1)
        shard = whole.chunk(2)[tp.rank]
        expected = quantize(whole, RECIPES[name], "grad_output", "columnwise").columnwise
        side = quantize(shard, RECIPES[name], "grad_output", "columnwise").columnwise
        if side.granularity.is_tensor or side.granularity.cols == 0:  # amaxes are shared before the cast
            codes = expected.codes.t().chunk(2)[tp.rank].contiguous().t()
            side = replace(side, codes=codes, scale_inv=expected.scale_inv)
        assert not side.codes.is_contiguous()
        for layout in (side, as_native(side)):
            found = tp.gather_side(layout, by_column=True, async_op=async_op).wait()
            assert_same_bytes(found.codes, expected.codes, f"{name} codes")
            assert_same_bytes(found.scale_inv, expected.scale_inv, f"{name} scales")
            assert found.codes.is_contiguous() == layout.codes.is_contiguous(), "the layout stays"
            assert found.codes.dtype == expected.codes.dtype
            if layout.granularity.cols == 128 and layout.scale_inv.stride(0) == 1:
                assert found.scale_inv.stride() == (1, FEATURES), "as block-scaled products take it"


@pytest.mark.parametrize("async_op", [False, True])
def test_columnwise_shards_in_both_layouts(ranks: RankPool, async_op: bool):
    ranks(2).run(gathers, list(RECIPES), async_op)

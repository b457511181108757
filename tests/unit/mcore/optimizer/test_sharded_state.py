"""A run of a tensor's elements as boxes: all of it, in order, each contiguous, and few."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_fp8.mcore.optimizer.sharded_state import boxes, rank_state, split_into_boxes

SHAPES = [(), (1,), (7,), (1, 5), (5, 1), (4, 6), (3, 4, 5), (2, 1, 3), (2, 3, 1, 4), (0,), (3, 0)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_run_of_a_small_tensor(shape):
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    for start in range(whole.size + 1):
        for end in range(start, whole.size + 1):
            parts = [
                whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
                for offset, size in boxes(shape, start, end)
            ]
            found = [number for part in parts for number in part.reshape(-1)]
            assert found == list(range(start, end))
            assert len(parts) <= max(1, 2 * len(shape) - 1) and all(part.size for part in parts)


def test_three_boxes_of_a_matrix():
    """The end of a row, whole rows, the beginning of a row; and one where the run is whole rows, or inside of one."""
    assert boxes((4, 5), 3, 17) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 2))]
    assert boxes((4, 5), 5, 15) == [((1, 0), (2, 5))]
    assert boxes((4, 5), 6, 9) == [((1, 1), (1, 3))]
    assert boxes((4, 5), 8, 12) == [((1, 3), (1, 2)), ((2, 0), (1, 2))]


def placed(parts: list[ShardedTensor], key: str, dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor, -1 where no part is."""
    shape = next(part.global_shape for part in parts if part.key == key)
    whole = torch.full(shape, -1.0, dtype=dtype)
    for part in (part for part in parts if part.key == key):
        into = whole[
            tuple(slice(o, o + s) for o, s in zip(part.global_offset, part.local_shape, strict=True))
        ]
        assert (into == -1).all(), "written twice"
        into.copy_(part.data)
    return whole


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_the_parts_of_all_ranks_are_the_tensor(ranks):
    """Of a shard that lies inside of a larger tensor, and with an axis that the parameter has not."""
    values = torch.arange(24.0)
    shard = ShardedTensor.from_rank_offsets(
        "w", values.view(4, 6), (0, 2, 5), (2, 1, 3), prepend_axis_num=1, replica_id=(0, 0, 3)
    )
    runs = [(24 * rank // ranks, 24 * (rank + 1) // ranks) for rank in range(ranks)]
    parts = [
        part
        for low, high in runs
        for part in split_into_boxes(shard, "master.w", values[low:high], low, replica=0)
    ]
    whole = placed(parts, "master.w", torch.float32)
    assert whole.shape == (5, 4, 18)
    assert torch.equal(whole[2, :, 6:12], values.view(4, 6))
    assert (whole == -1).sum() == whole.numel() - 24
    assert {part.replica_id for part in parts} == {(0, 0, 0)}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_factory_has_parts_of_both_its_tensors(ranks):
    """A gated MLP's projection is stored as two tensors, one after the other in the parameter."""

    def halves(key, data, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(f"{key}_{name}", half, (0, 1, 2), replica_id=replica_id)
            for name, half in zip("wv", torch.chunk(data, 2), strict=True)
        ]

    values = torch.arange(36.0)
    factory = ShardedTensorFactory("w", values.view(6, 6), halves, lambda state: state, (0, 0, 1))
    runs = [(36 * rank // ranks, 36 * (rank + 1) // ranks) for rank in range(ranks)]
    parts = [
        part
        for low, high in runs
        for part in split_into_boxes(factory, "w", values[low:high], low, replica=0)
    ]
    for name, half in zip("wv", values.view(6, 6).chunk(2), strict=True):
        assert torch.equal(placed(parts, f"w_{name}", torch.float32)[3:], half)


def test_a_tensor_that_is_no_run_of_elements_is_refused():
    def columns(key, data, replica_id, flattened_range):
        return [ShardedTensor.from_rank_offsets(key, data[:, :3], replica_id=replica_id)]

    factory = ShardedTensorFactory("w", torch.zeros(4, 6), columns, lambda state: state, (0, 0, 0))
    with pytest.raises(AssertionError, match="no contiguous range"):
        split_into_boxes(factory, "w", torch.zeros(24), 0, replica=0)


def test_masters_that_are_half_of_a_number_are_refused():
    """Transformer Engine's optimizer may keep the 16 bits that a BF16 weight lacks."""
    config = SimpleNamespace(
        store_param_remainders=True, use_precision_aware_optimizer_no_fp8_or_ds_fp8=True, bf16=True
    )
    optimizer = SimpleNamespace(config=config)
    with pytest.raises(ValueError, match=r"16 bits of each master .* Set store_param_remainders=False\."):
        rank_state(optimizer, torch.nn.Parameter(torch.zeros(2)))

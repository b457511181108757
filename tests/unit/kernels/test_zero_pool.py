"""Pairs of zeros: each handed out once, and none where another fill is needed."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from megatron_fp8.kernels import zero_pool

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_pool, "_pools", {})
    monkeypatch.setattr(zero_pool, "_PAIRS", 4)


def test_each_pair_is_handed_out_once() -> None:
    """Also those of a block that follows, whatever was written to others."""
    taken = [zero_pool.take(CPU) for _ in range(9)]
    for i, pair in enumerate(taken):
        assert pair.tolist() == [0, 0], i
        pair.fill_(i + 1)
    assert [pair.tolist() for pair in taken] == [[i + 1.0] * 2 for i in range(9)]
    assert len({pair.untyped_storage().data_ptr() for pair in taken}) == 3


def test_a_block_of_inference_serves_training() -> None:
    with torch.inference_mode():
        zero_pool.take(CPU)
    zero_pool.take(CPU).add_(1)  # as a reduction over ranks does


def test_fake_tensors_stay_in_their_mode() -> None:
    with FakeTensorMode():
        assert isinstance(zero_pool.take(CPU), FakeTensor)
    assert not isinstance(zero_pool.take(CPU), FakeTensor)


def test_a_captured_graph_fills_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay finds what the last one left in a block that was filled before the capture."""
    captures = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    assert not zero_pool._fills_each(torch.device("cuda", 0))
    captures = True
    assert zero_pool._fills_each(torch.device("cuda", 0))

"""Which calls go as one operator: the watched ones, and recomputations of watched ones."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fp8.linear import watched
from megatron_fp8.linear.watched import WatchedForwards, is_watched
from megatron_fp8.state.fp8_state import Fp8State

X = torch.ones(2, 2)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def recomputed(forwards: WatchedForwards) -> bool:
    with mock.patch.object(watched, "in_recompute", return_value=True):
        return forwards.as_operator(X)


def test_modes_and_tensors_without_memory():
    assert not is_watched(X, X)
    with Mode():
        assert is_watched(X)
    with FakeTensorMode() as mode:
        assert is_watched(X)
    assert is_watched(X, mode.from_tensor(X)) and is_watched(X.to("meta"))


@pytest.mark.parametrize("was", [True, False])
def test_a_recomputation_goes_as_its_forward_did(was):
    state = Fp8State()
    forwards = WatchedForwards(state)
    if was:
        with Mode():
            assert forwards.as_operator(X)
        assert recomputed(forwards)
    else:
        assert not forwards.as_operator(X)
        with Mode():
            assert not recomputed(forwards)
    state.iteration += 1
    assert not recomputed(forwards), "forwards of another iteration tell nothing"


def test_forwards_that_differed_tell_nothing():
    forwards = WatchedForwards(Fp8State())
    with Mode():
        forwards.as_operator(X)
    forwards.as_operator(X)
    assert not recomputed(forwards)
    with Mode():
        assert recomputed(forwards)


def test_a_capture_takes_all_steps():
    state = Fp8State()
    state.begin_capture()
    with Mode():
        assert not WatchedForwards(state).as_operator(X)

"""Building contexts, switching FP8 off, and knowing a recomputed forward from a first one."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_fp8.plan.switch import (
    LayerBeingBuilt,
    building_layer,
    disabled_reason,
    fp8_disabled,
    in_recompute,
    layer_being_built,
)


def test_building_layer_nests_and_is_left_on_errors():
    assert layer_being_built() is None
    with building_layer(3, None):
        assert layer_being_built() == LayerBeingBuilt(3, None)
        with building_layer(4, "first layers stay in BF16"):
            assert layer_being_built() == LayerBeingBuilt(4, "first layers stay in BF16")
        assert layer_being_built() == LayerBeingBuilt(3, None)
        with pytest.raises(KeyError), building_layer(5, None):
            raise KeyError
        assert layer_being_built() == LayerBeingBuilt(3, None)
    assert layer_being_built() is None


def test_fp8_disabled_nests_and_none_changes_nothing():
    assert disabled_reason() is None
    with fp8_disabled(None):
        assert disabled_reason() is None
    with fp8_disabled("debugging"):
        assert disabled_reason() == "debugging"
        with fp8_disabled(None):
            assert disabled_reason() == "debugging", "no context can switch FP8 on again"
        with fp8_disabled("layer 0"):
            assert disabled_reason() == "layer 0"
        assert disabled_reason() == "debugging"
    with pytest.raises(KeyError), fp8_disabled("x"):
        raise KeyError
    assert disabled_reason() is None


class Watch:
    """Multiplies by a weight; notes where it ran."""

    def __init__(self, disable: str | None = None):
        self.seen: list[tuple[bool, str | None]] = []
        self.disable = disable

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with fp8_disabled(self.disable):
            self.seen.append((in_recompute(), disabled_reason()))
            return (x * x).sin()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("disable", [None, "layer 0 stays in BF16"])
def test_recompute_is_seen_as_such_and_disables_again(reentrant, disable):
    x = torch.randn(4, requires_grad=True)
    watch, plain = Watch(disable), Watch(disable)
    y = checkpoint(watch, plain(x), use_reentrant=reentrant)
    assert not in_recompute()
    plain(y).sum().backward()
    assert watch.seen == [(False, disable), (True, disable)]
    assert plain.seen == [(False, disable), (False, disable)]
    assert not in_recompute() and disabled_reason() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_nested_recompute(reentrant):
    x = torch.randn(4, requires_grad=True)
    watch = Watch()

    def block(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(watch, x, use_reentrant=reentrant)

    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    recomputed = [seen for seen, _ in watch.seen]
    assert recomputed[0] is False and len(recomputed) >= 2 and all(recomputed[1:])


def test_plain_forwards_and_backwards_are_no_recompute():
    x = torch.randn(4, requires_grad=True)
    watch = Watch()
    for _ in range(2):
        watch(x).sum().backward()
    with torch.no_grad():
        watch(x)
    assert watch.seen == [(False, None)] * 3

"""FP8 switched off around a call that torch.utils.checkpoint recomputes: the recomputation answers as the forward did."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.fp8_gpt import fp8_config
from benchmarks.support.ranks import Layout, RankPool, model_parallel
from megatron_fp8.plan.autocast_state import AutocastState, current_autocast_state, fp8_disabled, remember_fp8
from tests.support.mcore_linears import make_linear, random_input

OFF = "a test says so"


def reason() -> str:
    return current_autocast_state().reason


def off() -> AbstractContextManager[None]:
    return fp8_disabled(OFF)


def gradients(
    way: str, forward: list[Callable[[], AbstractContextManager[None]]], backward: Any, remember: bool = False
) -> tuple[list[torch.Tensor], int, int]:
    """(gradients, FP8 and other GEMMs) of a linear and a gelu, called once for each of the contexts of ``forward``.

    ``backward``: the context of the backward. ``way``: 'plain', 'reentrant' or 'saved' (the other checkpoint).
    """
    from megatron_fp8.mcore.runtime import state_of

    with model_parallel():
        config = fp8_config(Layout(), "mxfp8")
        linear, x = make_linear(config, bias=False), random_input(32, 2, 64)

        def block(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(linear(x)[0])

        total = torch.zeros(())
        for around in forward:
            with around():
                run = remember_fp8(block) if remember else block
                y = run(x) if way == "plain" else checkpoint(run, x, use_reentrant=way == "reentrant")
                total = total + y.float().square().sum()
        with backward():
            total.backward()
        counts = state_of(config).counts
        return [x.grad, linear.weight.grad], counts.fp8_gemms, counts.hp_gemms


def compared(way: str, remember: bool) -> None:
    """A rank case: on and off, the backward inside the other, against no recompute."""
    for around, other in ((off, nullcontext), (nullcontext, off)):
        plain, *plain_gemms = gradients("plain", [around], nullcontext)
        again, *gemms = gradients(way, [around], other, remember)
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
        on = around is nullcontext
        assert plain_gemms == ([3, 0] if on else [0, 3]) and gemms == ([4, 0] if on else [0, 4])


@pytest.mark.parametrize("remember", [False, True], ids=["told-nothing", "remembered"])
@pytest.mark.parametrize("way", ["reentrant", "saved"])
def test_recomputation_answers_as_the_forward_did(ranks: RankPool, way: str, remember: bool) -> None:
    ranks(1).run(compared, way, remember)


def mixed(way: str) -> str:
    """A rank case: a linear that ran both ways. Right with remember_fp8; what is said without it."""
    plain, *_ = gradients("plain", [off, nullcontext], nullcontext)
    again, *gemms = gradients(way, [off, nullcontext], nullcontext, remember=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)) and gemms == [4, 4]
    with pytest.raises(RuntimeError) as error:
        gradients(way, [off, nullcontext], nullcontext)
    return str(error.value)


@pytest.mark.parametrize("way", ["reentrant", "saved"])
def test_a_guess_is_an_error(ranks: RankPool, way: str) -> None:
    assert "remember_fp8(function)" in ranks(1).run(mixed, way)[0]


def test_remembering_reaches_other_threads_and_leaves_nothing_behind():
    with fp8_disabled(OFF):
        inside = remember_fp8(reason)
    outside = remember_fp8(reason)
    heard = []
    thread = threading.Thread(target=lambda: heard.extend([inside(), outside(), reason()]))
    thread.start()
    thread.join()
    with fp8_disabled("another"):
        heard += [inside(), outside(), reason()]
    assert heard == [OFF, "", "", OFF, "", "another"] and current_autocast_state() == AutocastState()

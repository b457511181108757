"""Bound calls, and who else looks at them: observers, hooks, recomputation, tracers, autocast, other threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.linear import kinds
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.kinds import Kind
from megatron_fp8.linear.stand_in import StandIn
from tests.support.bound_casts import Machine, casts_that_bind
from tests.support.bound_linears import Linear, Never, Pair, x_and_dy


@pytest.fixture
def machine() -> Iterator[Machine]:
    with casts_that_bind() as machine:
        yield machine


class Watcher:
    def __init__(self) -> None:
        self.told: list[str] = []

    def wants(self, iteration: int) -> bool:
        return True

    def cast(self, seen: Any) -> None:
        self.told.append(f"cast {seen.slot}")

    def product(self, seen: Any) -> None:
        self.told.append(seen.gemm)


def test_an_observer_is_told(machine: Machine) -> None:
    """From the next call on, in the backward too; codes that were kept while it watched lie otherwise (MX)."""
    pair, given = Pair(machine, "mxfp8"), x_and_dy()
    pair.bind(*given)
    x = given[0].detach().requires_grad_()
    y = fp8_linear(x, pair.both[0].weight, None, pair.site)
    watcher: Any = Watcher()
    pair.both[0].state.watch(watcher)
    y.backward(given[1])
    assert watcher.told == ["cast a.grad_output", "dgrad", "wgrad"]
    fp8_linear(x, pair.both[0].weight, None, pair.site, fresh_weight=True).backward(given[1])
    assert watcher.told[3:6] == ["cast a.input", "cast a.weight", "fprop"]
    pair.both[0].state.watch(None)
    fp8_linear(x, pair.both[0].weight, None, pair.site).backward(given[1])
    pair.both[0].state.watch(None)
    for linear in pair.both:
        linear.gradients()
        linear.state.discard_iteration()
    pair(*given)


def test_hooks_of_kernels_and_other_devices(machine: Machine) -> None:
    pair, given = Pair(machine), x_and_dy()
    pair.bind(*given)
    for name, value in (("hooks", True), ("device", 1)):
        before = getattr(machine, name)
        setattr(machine, name, value)
        assert pair(*given) == 0
        setattr(machine, name, before)
        assert pair(*given) == 2


# ------------------------------------------------------------------------------------------------------- what is around


def test_recomputation_records_nothing(machine: Machine) -> None:
    pair, (x, dy) = Pair(machine, "delayed"), x_and_dy()
    pair.bind(x, dy)

    def recomputed(linear: Linear) -> list[Any]:
        linear.state.arenas[0].rows.zero_()
        mine = x.detach().requires_grad_()
        run = lambda x: fp8_linear(x, linear.weight, None, linear.site)  # noqa: E731
        y = checkpoint(run, mine, use_reentrant=False)
        linear.state.arenas[0].rows.fill_(0.25)
        y.backward(dy)
        return [y, mine.grad, *linear.gradients(), *linear.told()]

    for _ in range(6):
        pair.each(recomputed)


def test_saved_tensors_that_come_back_otherwise(machine: Machine) -> None:
    """Offloading may bring back codes that lie in another order."""
    pair, (x, dy) = Pair(machine, "rowwise"), x_and_dy()
    pair.bind(x, dy)

    def offloaded(linear: Linear) -> list[Any]:
        turned = lambda t: t.t().contiguous().t() if t.ndim == 2 and t.dtype.itemsize == 1 else t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, turned):
            return linear(x, dy)

    for _ in range(6):
        pair.each(offloaded)
    assert pair(x, dy) == 2


def test_second_derivatives_are_refused(machine: Machine) -> None:
    pair, (x, dy) = Pair(machine), x_and_dy()
    pair.bind(x, dy)
    x = x.detach().requires_grad_()
    y = fp8_linear(x, pair.both[0].weight, None, pair.site)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.float().square().sum().backward()


def test_traced_and_transformed(machine: Machine) -> None:
    """torch.compile and dispatch modes get one operator, torch.func an error, whatever was bound before."""
    pair, (x, dy) = Pair(machine), x_and_dy()
    pair.bind(x, dy)
    linear = pair.both[0]
    seen: list[str] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        fp8_linear(x, linear.weight, None, linear.site)
    assert seen[0] == "megatron_fp8.linear.default"
    compiled = torch.compile(lambda x: fp8_linear(x, linear.weight, None, linear.site), backend="eager")
    graphs = torch._dynamo.explain(lambda x: fp8_linear(x, linear.weight, None, linear.site))(x)
    assert graphs.graph_break_count == 0
    assert_same_bytes(compiled(x).detach(), fp8_linear(x, linear.weight, None, linear.site).detach())
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(lambda x: fp8_linear(x, linear.weight, None, linear.site).sum())(x.detach())


def test_autocast_changes_nothing(machine: Machine) -> None:
    pair, given = Pair(machine, "rowwise", bias=True), x_and_dy()
    pair.bind(*given)

    def autocast(linear: Linear) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return linear(*given)

    plain = pair.both[1](*given)[:4]
    for one, other in zip(autocast(pair.both[0])[:4], plain, strict=True):
        assert_same_bytes(one.detach(), other.detach())


def test_deterministic_algorithms_change_nothing(machine: Machine) -> None:
    pair, given = Pair(machine), x_and_dy()
    pair.bind(*given)
    torch.use_deterministic_algorithms(True)
    try:
        assert pair(*given) == 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_experiments_are_not_bound(machine: Machine) -> None:
    """A stand-in multiplies otherwise: here by a weight of three bits."""
    pair, (x, dy) = Pair(machine), x_and_dy()
    pair.bind(x, dy)

    def experiment(linear: Linear) -> list[Any]:
        stand_in = StandIn(linear.site, {("fprop", "input")}, {("fprop", "weight"): 3})
        stand_in.kinds = linear.site.kinds if isinstance(linear.site.kinds, Never) else stand_in.kinds
        for _ in range(5):
            with linear.site.replaced_by(stand_in):
                mine = x.detach().requires_grad_()
                y = fp8_linear(mine, linear.weight, None, linear.site.acting)
                y.backward(dy)
        return [y, mine.grad, *linear.gradients()]

    assert pair.each(experiment) == 0


def test_two_models_and_two_threads(machine: Machine) -> None:
    """Each site has its own; threads that note at once do not meet in each other's notes."""
    pairs = [Pair(machine, recipe) for recipe in ("rowwise", "delayed")]
    given = [x_and_dy(seed=seed) for seed in (1, 2)]
    expected = [[pair.both[1](*given[i])[:3] for i in range(2)] for pair in pairs]
    wrong: list[Any] = []

    def work(mine: int) -> None:
        for _ in range(12):
            for pair, values in zip(pairs, expected, strict=True):
                linear = pair.both[0]
                x = given[mine][0].detach().requires_grad_()
                y = fp8_linear(x, linear.weight, None, linear.site)
                dx, dw = torch.autograd.grad(y, (x, linear.weight), given[mine][1])
                for one, other in zip((y, dx, dw), values[mine], strict=True):
                    if not torch.equal(one.detach(), other.detach()):  # type: ignore[union-attr]
                        wrong.append((mine, pair))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kinds_are_limited_and_tried_a_few_times(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_MOST", 3)
    pair = Pair(machine, "tensorwise")
    for tokens in (16, 32, 48, 64, 80):
        pair(*x_and_dy(tokens=tokens))
    assert len(pair.site.kinds._met) <= 3
    kind, tries = Kind(), kinds._TRIES
    assert [kind.to_be_noted() for _ in range(tries + 3)] == [False, *[True] * tries, False, False]


def test_a_site_that_is_gone_is_free_at_once(machine: Machine) -> None:
    """What is bound refers to no site."""
    pair, given = Pair(machine, "rowwise"), x_and_dy()
    pair.bind(*given)
    gone = weakref.ref(pair.site)
    gc.disable()
    try:
        pair.both.clear()
        assert gone() is None
    finally:
        gc.enable()

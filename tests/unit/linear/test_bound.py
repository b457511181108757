"""Calls that come again are bound, to the bit of the ordinary way; whatever is other about a call is noticed.

Each case runs two linears side by side: one whose calls are bound, and one whose calls never are. Bound casts read memory
as they were bound to read it, so a guard that was missing would give other numbers, or a crash.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends.native import backend as native
from megatron_fp8.linear import kinds
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.kinds import Kind, Kinds
from megatron_fp8.linear.site import GemmSite
from megatron_fp8.linear.stand_in import StandIn
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.quantizer import Quantizer
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.bound_casts import Machine, casts_that_bind
from tests.support.no_values import warm
from tests.support.sites import RECIPES

BF16 = torch.bfloat16
NAMES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")


@pytest.fixture
def machine() -> Iterator[Machine]:
    with casts_that_bind() as machine:
        yield machine


class Never(Kinds):
    """Of a site whose calls are never bound."""

    def of(self, key: Any) -> Kind:
        return Never.kind

    class _Kind(Kind):
        def to_be_noted(self) -> bool:
            return False

    kind = _Kind()


class Linear:
    """A site with its weight: one of two that are treated alike."""

    def __init__(self, recipe: str, *, binds: bool, bias: bool = False, keeps: bool = True, **options: Any):
        self.state = Fp8State(keeps_weights=keeps)
        plan = fp8_site("a", 0, RECIPES[recipe], "native", "test", **options)
        self.site = GemmSite(plan, self.state, None)
        if not binds:
            self.site.kinds = Never()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(128, 256, generator=generator).to(BF16))
        self.bias = torch.nn.Parameter(torch.randn(128, generator=generator).to(BF16)) if bias else None
        self.options: dict[str, Any] = {}

    def __call__(self, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor | None]:
        """y, gradients, what slots have recorded and what was counted."""
        x = x.detach().requires_grad_(x.requires_grad)
        y = fp8_linear(x, self.weight, self.bias, self.site, **self.options)
        y.backward(dy)
        return [y, x.grad, *self.gradients(), *self.told()]

    def gradients(self) -> list[torch.Tensor | None]:
        found = [None if p is None else p.grad for p in (self.weight, self.bias)]
        self.weight.grad = None
        if self.bias is not None:
            self.bias.grad = None
        return [*found, getattr(self.weight, "main_grad", None)]

    def told(self) -> list[torch.Tensor]:
        counts = self.state.counts
        return [
            self.state.arenas[0].rows[:, :3].clone(),
            torch.tensor([counts.casts, counts.fp8_gemms, counts.hp_gemms]),
        ]


class Pair:
    """Both. ``bound`` says how often a forward or a backward ran bound in the last call."""

    def __init__(self, machine: Machine, recipe: str = "tensorwise", **options: Any):
        self.machine, self.bound = machine, 0
        self.both = [Linear(recipe, binds=binds, **options) for binds in (True, False)]

    def __call__(self, x: torch.Tensor, dy: torch.Tensor) -> int:
        return self.each(lambda linear: linear(x, dy))

    def each(self, work: Callable[[Linear], Any]) -> int:
        """Do it to both, and compare; how many casts of the first were bound."""
        before = self.machine.bound
        first = work(self.both[0])
        bound = self.machine.bound - before
        second = work(self.both[1])
        assert self.machine.bound - before == bound, "the second is never bound"
        for one, other in zip(first or [], second or [], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_same_bytes(one.detach(), other.detach())
        return bound

    def bind(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Call until nothing changes: forward and backward are bound."""
        found = [self(x, dy) for _ in range(7)]
        assert found[-1] == found[-2] >= 2 and found[0] == 0, found

    def bind_again(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """Call until a kind that may have been met is bound."""
        assert [self(x, dy) for _ in range(7)][-1] >= 2

    @property
    def site(self) -> GemmSite:
        return self.both[0].site


def x_and_dy(
    tokens: int = 128, seed: int = 0, dtype: torch.dtype = BF16
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (256, 128))
    return x.requires_grad_(), dy


# -------------------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe(recipe: str, bias: bool, keeps: bool, machine: Machine) -> None:
    """Input and gradient are cast bound, and the weight where it is not kept; each call has other values."""
    pair = Pair(machine, recipe, bias=bias, keeps=keeps)
    found = []
    for call in range(9):
        if call == 4:
            for linear in pair.both:
                linear.state.finish_iteration()  # delayed: scales come
        found.append(pair(*x_and_dy(seed=call)))
    casts = 2 if keeps else 3
    assert found[-1] == casts and found[0] == 0, found


def test_any_leading_dimensions(machine: Machine) -> None:
    pair = Pair(machine, "rowwise", bias=True)
    x, dy = x_and_dy()
    pair.bind(x.detach().view(4, 32, 256).requires_grad_(), dy.view(4, 32, 128))


def test_main_grad(machine: Machine) -> None:
    """wgrad is added, and DDP is told; from one call to the next it may come, and go."""
    pair, given = Pair(machine, "blockwise"), x_and_dy()
    pair.bind(*given)
    for linear in pair.both:
        linear.weight.main_grad = torch.ones(128, 256)  # type: ignore[attr-defined]
        linear.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def added(linear: Linear) -> list[Any]:
        linear.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        y, dx, _, *others = linear(*given)
        assert linear.weight.grad_added_to_main_grad
        return [y, dx, *others]

    assert [pair.each(added) for _ in range(4)][-1] == 2
    for linear in pair.both:
        del linear.weight.main_grad, linear.weight.grad_added_to_main_grad
    assert pair(*given) == 2


def test_products_that_add_by_themselves(machine: Machine) -> None:
    """As this package's kernel for blocks does: nothing of such a backward is bound."""

    def accumulate(a: Any, b: Any, into: torch.Tensor) -> bool:
        into.add_(native.gemm(a, b, out_dtype=torch.float32))
        return True

    pair, given = Pair(machine, "blockwise"), x_and_dy()
    for linear in pair.both:
        linear.weight.main_grad = torch.ones(128, 256)  # type: ignore[attr-defined]
        linear.weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def added(linear: Linear) -> list[Any]:
        y, dx, _, *others = linear(*given)
        return [y, dx, *others]

    with mock.patch.object(native, "accumulate", accumulate):
        assert [pair.each(added) for _ in range(6)][-1] == 1, "the forward"


# ----------------------------------------------------------------------------------------------------------- other calls

SHIFTED = torch.randn(128 * 256 + 1, generator=torch.Generator().manual_seed(5)).to(BF16)
OTHERS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "shape": x_and_dy(tokens=64, seed=1),
    "dtype": x_and_dy(seed=1, dtype=torch.float32),
    "strides": (x_and_dy(seed=1)[0].detach().t().contiguous().t().requires_grad_(), x_and_dy()[1]),
    "alignment": (SHIFTED[1:].view(128, 256).requires_grad_(), x_and_dy()[1]),
    "no gradient": (x_and_dy(seed=1)[0].detach(), x_and_dy()[1]),
    "gradient's strides": (x_and_dy(seed=1)[0], torch.full((), 0.5, dtype=BF16).expand(128, 128)),
    "gradient's alignment": (x_and_dy(seed=1)[0], SHIFTED[1 : 128 * 128 + 1].view(128, 128)),
    "negated": (torch._neg_view(x_and_dy(seed=1)[0].detach()).requires_grad_(), x_and_dy()[1]),
    "gradient negated": (x_and_dy(seed=1)[0], torch._neg_view(x_and_dy(seed=1)[1])),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind(other: str, machine: Machine) -> None:
    """Calls of another kind between those of the first."""
    pair, given = Pair(machine, "rowwise"), x_and_dy()
    pair.bind(*given)
    for _ in range(7):
        pair(*OTHERS[other])
        assert pair(*given) >= 2
    pair = Pair(machine, "rowwise")
    for _ in range(7):
        pair(*OTHERS[other])
    pair(*given)


@pytest.mark.parametrize("first", [True, False])
def test_frozen_weight(first: bool, machine: Machine) -> None:
    pair, given = Pair(machine, "mxfp8", bias=True), x_and_dy()
    for wanted in (first, not first, first):
        for linear in pair.both:
            linear.weight.requires_grad_(wanted)
        assert [pair(*given) for _ in range(7)][-1] >= 2


def test_a_bias_comes_and_goes(machine: Machine) -> None:
    pair, given = Pair(machine, "rowwise"), x_and_dy()
    pair.bind(*given)
    for _ in range(2):
        for linear in pair.both:
            linear.bias = torch.nn.Parameter(torch.ones(128, dtype=BF16))
        pair.bind_again(*given)
        for linear in pair.both:
            linear.bias = None
        assert pair(*given) == 2


def test_a_part_of_the_gradients(machine: Machine) -> None:
    pair, (x, dy) = Pair(machine, "rowwise"), x_and_dy()
    pair.bind(x, dy)

    def only(linear: Linear, wanted: Callable[[torch.Tensor, Linear], torch.Tensor]) -> list[Any]:
        mine = x.detach().requires_grad_()
        y = fp8_linear(mine, linear.weight, None, linear.site)
        return [*torch.autograd.grad(y, wanted(mine, linear), dy), *linear.told()]

    for _ in range(6):
        pair.each(lambda linear: only(linear, lambda mine, _: mine))
        pair.each(lambda linear: only(linear, lambda _, linear: linear.weight))
    assert pair(x, dy) == 2


OPTIONS = {
    "evaluation": {"training": False},
    "input kept": {"save_original_input": True},
    "first microbatch": {"fresh_weight": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_another_way_to_call(option: str, machine: Machine) -> None:
    pair, given = Pair(machine, "delayed"), x_and_dy()
    pair.bind(*given)
    for linear in pair.both:
        linear.options = OPTIONS[option]
    found = [pair(*given) for _ in range(6)]
    assert found[-1] == (3 if option == "first microbatch" else 0)
    for linear in pair.both:
        linear.options = {}
    assert pair(*given) == 2


# ------------------------------------------------------------------------------------------- what changes beside a call


def test_the_weight_changes(machine: Machine) -> None:
    """In place, in its storage, or by an optimizer that says so: codes are those of the weight as it is."""
    pair, given = Pair(machine, "blockwise"), x_and_dy()
    pair.bind(*given)
    with torch.no_grad():
        for linear in pair.both:
            linear.weight.mul_(1.5)
    pair(*given)
    for linear in pair.both:
        linear.weight.data = linear.weight.data.clone().mul_(0.5)
    pair(*given)
    for linear in pair.both:
        linear.weight.data.mul_(3.0)  # leaves no trace
        linear.state.weight_generation += 1
    pair(*given)
    for linear in pair.both:
        linear.weight.data = linear.weight.data.t().contiguous().t()
    for _ in range(6):
        pair(*given)
    for linear in pair.both:
        linear.weight = torch.nn.Parameter(
            torch.randn(256, 256, generator=torch.Generator().manual_seed(9)).to(BF16)
        )
    pair(given[0], x_and_dy()[0].detach())


def test_the_slots_move(machine: Machine) -> None:
    pair, given = Pair(machine, "delayed"), x_and_dy()
    pair.bind(*given)
    for linear in pair.both:
        for _ in range(200):
            linear.state.arenas[0].add(None, linear.site.casts["input"].quantizers[0].rule.fmt)
    assert pair(*given) == 0, "what is bound has other pointers"
    assert [pair(*given) for _ in range(7)][-1] == 2


def test_scales_come_and_go(machine: Machine) -> None:
    pair, given = Pair(machine, "delayed"), x_and_dy()
    pair.bind(*given)
    for linear in pair.both:
        warm(linear.state)
        linear.state.arenas[0].scale.fill_(3.0)
    assert pair(*given) == 0
    pair.bind_again(*given)
    for linear in pair.both:
        for slot in linear.state.slots():
            slot.warm = False
    pair(*given)


@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_a_quantizer_is_replaced(role: str, machine: Machine) -> None:
    """As preparing a model for inference does."""
    pair, given = Pair(machine, "tensorwise", keeps=False), x_and_dy()
    pair.bind(*given)

    class Doubled(Quantizer):
        def __call__(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
            return super().__call__(x * 2, *args, **options)

    for linear in pair.both:
        casts = linear.site.casts[role]
        old = casts.shared
        assert old is not None
        casts.rowwise = casts.columnwise = Doubled(old.rule, old.slot, old.backend)
    for _ in range(6):
        pair(*given)


def test_columnwise_codes_are_no_longer_kept(machine: Machine) -> None:
    pair, given = Pair(machine, "rowwise"), x_and_dy()
    for linear in pair.both:
        linear.options = {"fresh_weight": True}  # so that the weight's cast is bound
    pair.bind(*given)
    for linear in pair.both:
        linear.options = {}
    for keeps in (False, True):
        for linear in pair.both:
            linear.state.keeps_columnwise = keeps
            linear.state.weight_generation += 1
        x = given[0].detach().requires_grad_()
        y = fp8_linear(x, pair.both[0].weight, None, pair.site)
        kept = pair.site.weights.kept
        assert kept is not None and (kept.columnwise is not None) is keeps
        y.backward(given[1])
        fp8_linear(x, pair.both[1].weight, None, pair.both[1].site).backward(given[1])
        pair.each(lambda linear: linear.gradients())
        pair(*given)


def test_weights_are_no_longer_kept(machine: Machine) -> None:
    pair, given = Pair(machine, "tensorwise"), x_and_dy()
    pair.bind(*given)
    for linear in pair.both:
        linear.state.keeps_weights = False
        linear.weight.data.mul_(2.0)  # leaves no trace
    pair(*given)
    assert [pair(*given) for _ in range(3)][-1] == 3 and pair.site.weights.kept is None


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
        linear.state.arenas[0].rows.zero_()
        linear.state._count_in(type(linear.state.counts)())
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

"""Calls that come again are bound, to the bit of the ordinary way; whatever is other about a call is noticed.

Each case runs two linears side by side: one whose calls are bound, and one whose calls never are. Bound casts read memory
as they were bound to read it, so a guard that was missing would give other numbers, or a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.backends.native import backend as native
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.quantizer import Quantizer
from tests.support.bound_casts import Machine, casts_that_bind
from tests.support.bound_linears import BF16, NAMES, Linear, Pair, x_and_dy
from tests.support.no_values import warm


@pytest.fixture
def machine() -> Iterator[Machine]:
    with casts_that_bind() as machine:
        yield machine


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


@pytest.mark.parametrize("recipe", NAMES)
def test_any_number_of_tokens(recipe: str, machine: Machine) -> None:
    """The cast fills up what wgrad sums over. Blockwise's fprop and dgrad want tokens in 4s: 132."""
    pair = Pair(machine, recipe, bias=True)
    pair.bind(*x_and_dy(tokens=132 if recipe == "blockwise" else 131))


@pytest.mark.parametrize("recipe", NAMES)
def test_hooks_for_saved_tensors_bring_the_zeros_back(recipe: str, machine: Machine) -> None:
    """Codes are kept with what was filled up behind them, so a copy has it too."""
    given, found, sizes = x_and_dy(tokens=131), [], set()

    def copied(saved: torch.Tensor) -> torch.Tensor:
        sizes.add(saved.shape)
        return torch.empty(saved.shape, dtype=saved.dtype).copy_(saved)

    for unpack in (copied, lambda saved: saved):
        linear = Linear(recipe, binds=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            found.append(linear(*given))
    whole = {"blockwise": 256, "mxfp8": 160}.get(recipe, 144)
    assert torch.Size((256, whole)) in sizes
    for one, other in zip(*found, strict=True):
        if one is not None:
            assert_same_bytes(one.detach(), other.detach())


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

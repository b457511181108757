"""Which experts are computed as one, and that it makes no difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.kernels.cpu import batched_cast, emulation, grouped
from megatron_fp8.linear import cpu_expert_batch
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.linear.grouped import grouped_linear
from megatron_fp8.recipe import Float8CurrentScaling, Recipe
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import make_site, randn

pytestmark = pytest.mark.skipif(emulation.inner_loop() is None, reason="no inner loop for products")

TOKENS = (70, 0, 200, 17)
K, N = 160, 136


def experts(recipe: Recipe | str, **options: Any) -> tuple[Fp8State, list[GemmSite]]:
    state = Fp8State()
    named = [f"experts.{e}.fc1" for e in range(len(TOKENS))]
    return state, [make_site(recipe, state=state, name=name, recording=False, **options)[0] for name in named]


def parameters() -> list[Any]:
    made: list[Any] = [torch.nn.Parameter(randn(N, K, seed=10 + e)) for e in range(len(TOKENS))]
    for parameter in made:
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(N, K), False
    return made


def steps(sites: list[GemmSite], weights: list[Any], microbatches: int) -> list[torch.Tensor]:
    """Results, input gradients, and at the end main_grads."""
    found = []
    for i in range(microbatches):
        x = randn(sum(TOKENS), K, seed=i).requires_grad_()
        y = grouped_linear(x, weights, TOKENS, sites)
        y.backward(randn(sum(TOKENS), N, seed=50 + i))
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return [*found, *(weight.main_grad for weight in weights)]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many operands each call of the stacks' cast had."""
    seen: list[int] = []
    real = batched_cast.quantize
    monkeypatch.setattr(batched_cast, "quantize", lambda wanted: seen.append(len(wanted)) or real(wanted))
    return seen


@pytest.mark.parametrize("recipe", ["blockwise", "delayed", "rowwise"])
def test_weights_that_are_kept_are_cast_once(recipe: str, casts: list[int], monkeypatch: Any) -> None:
    """In the second microbatch only tokens and gradients are; it has the bits of experts one by one."""
    found = steps(experts(recipe)[1], parameters(), 2)
    assert casts == [2, 1, 1, 1]
    monkeypatch.setattr(cpu_expert_batch, "weights_of", lambda *args: False)
    for one, other in zip(found, steps(experts(recipe)[1], parameters(), 2), strict=True):
        assert_same_bytes(one, other)
    assert len(casts) == 4


def test_a_weight_that_was_kept_otherwise(casts: list[int]) -> None:
    """One was written meanwhile, so that three of four are kept: all experts are computed one by one, and the next
    iteration is as one again."""
    state, sites = experts("blockwise")
    weights = parameters()
    steps(sites, weights, 1)
    with torch.no_grad():
        weights[2].mul_(2)
    steps(sites, weights, 1)
    assert casts == [2, 1]
    state.finish_iteration()
    steps(sites, weights, 1)
    assert casts == [2, 1, 2, 1]


def test_some_of_the_experts_whose_weights_one_cast_made(casts: list[int]) -> None:
    """The first two, as where the others are called by themselves from now on: with the weights that are kept."""
    _, sites = experts("blockwise")
    weights, x = parameters(), randn(sum(TOKENS), K, seed=0)
    whole, some = grouped_linear(x, weights, TOKENS, sites), sum(TOKENS[:2])
    assert casts == [2]
    assert_same_bytes(grouped_linear(x[:some], weights[:2], TOKENS[:2], sites[:2]), whole[:some])
    assert_same_bytes(grouped_linear(x, weights, TOKENS, sites), whole)
    assert casts == [2, 1]


def test_a_backward_that_is_watched_is_that_of_each_expert(casts: list[int], monkeypatch: Any) -> None:
    found = steps(experts("blockwise")[1], parameters(), 1)
    casts.clear()
    monkeypatch.setattr(cpu_expert_batch, "can_go_back", lambda *args: False)
    for one, other in zip(found, steps(experts("blockwise")[1], parameters(), 1), strict=True):
        assert_same_bytes(one, other)
    assert casts == [2]


@pytest.mark.parametrize(
    "options",
    [
        {"overrides": {"experts.1.*": "bf16"}},
        {"overrides": {"experts.3.*": "mxfp8"}},
        {"recipe": Float8CurrentScaling(stochastic_rounding=True)},
    ],
    ids=["one in BF16", "one of another recipe", "random bits"],
)
def test_experts_that_are_not_alike(options: dict[str, Any], casts: list[int]) -> None:
    steps(experts(**{"recipe": "blockwise", **options})[1], parameters(), 1)
    assert casts == []


def test_a_main_grad_of_another_shape_is_refused() -> None:
    """C would write past its end."""
    weights = parameters()
    weights[2].main_grad = torch.zeros(N, K - 1)
    with pytest.raises(ValueError, match=r"a main_grad of shape \(136, 159\) is no sum"):
        steps(experts("blockwise")[1], weights, 1)


@pytest.mark.parametrize("as_one", [True, False], ids=["as one", "one by one"])
def test_experts_that_share_a_weight_add_to_its_gradient_in_turn(as_one: bool, monkeypatch: Any) -> None:
    """Threads that added to the same memory at once would lose what another adds."""
    if not as_one:
        monkeypatch.setattr(cpu_expert_batch, "weights_of", lambda *args: False)
    met: list[list[int]] = []
    real = grouped.make
    monkeypatch.setattr(
        grouped, "make", lambda told, *rest: met.append([one.out.at for one in told]) or real(told, *rest)
    )
    apart = parameters()
    steps(experts("blockwise")[1], apart, 1)
    shared = parameters()
    shared[2], apart_too = shared[0], parameters()
    apart_too[2].data.copy_(apart_too[0])
    found = steps(experts("blockwise")[1], shared, 1)
    expected = steps(experts("blockwise")[1], apart_too, 1)
    assert_same_bytes(found[0], expected[0])
    assert_same_bytes(found[1], expected[1])
    assert_same_bytes(shared[0].main_grad, apart_too[0].main_grad + apart_too[2].main_grad)
    assert_same_bytes(shared[3].main_grad, apart_too[3].main_grad)
    assert all(len({*addresses}) == len(addresses) for addresses in met)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
def test_torchs_default_dtype_changes_nothing(recipe: str) -> None:
    x, dy = randn(sum(TOKENS), K, seed=1), randn(sum(TOKENS), N, seed=2)
    found = []
    for dtype in (torch.float32, torch.float64):
        weights, leaf = parameters(), x.clone().requires_grad_()
        torch.set_default_dtype(dtype)
        try:
            grouped_linear(leaf, weights, TOKENS, experts(recipe)[1]).backward(dy)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append([leaf.grad, *(weight.main_grad for weight in weights)])
    for one, other in zip(*found, strict=True):
        assert_same_bytes(one, other)

"""The linears of a layer's experts in one call: the bits of one call for each, whatever the numbers of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.backends import emulated
from megatron_fp8.linear.function import grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.recipe import Float8CurrentScaling, Recipe
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import ALL_RECIPES, in_turn, make_site, randn

TOKENS = (70, 0, 200, 1, 129, 16)  # none, few rows, a block and one more
K, N = 160, 136


pytestmark = pytest.mark.usefixtures("one_thread")


def experts(
    recipe: Recipe | str, count: int = len(TOKENS), **options: Any
) -> tuple[Fp8State, list[GemmSite]]:
    """Sites that share a state."""
    state = Fp8State()
    made = [
        make_site(recipe, state=state, name=f"experts.{e}.fc1", recording=False, **options)[0]
        for e in range(count)
    ]
    return state, made


def matrices(tokens: tuple[int, ...] = TOKENS) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """x [T, K], the experts' weights [N, K], dy [T, N]."""
    weights = [randn(N, K, seed=10 + e) for e in range(len(tokens))]
    return randn(sum(tokens), K, seed=1), weights, randn(sum(tokens), N, seed=2)


def train(
    linear: Any,
    recipe: str,
    *,
    main_grad: torch.dtype | None,
    iterations: int = 2,
    nan: bool = False,
    **options: Any,
) -> SimpleNamespace:
    """Results and gradients of a few iterations, and what the state holds afterwards; main_grad: its dtype, if any; nan:
    whether the first expert's tokens hold one."""
    state, sites = experts(recipe, **options)
    x, weights, dy = matrices()
    if nan:
        x[3, 5] = torch.nan
    found = []
    parameters: list[Any] = [torch.nn.Parameter(weight) for weight in weights]
    for parameter in parameters if main_grad else ():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(N, K, dtype=main_grad), False
    for _ in range(iterations):
        leaf = x.clone().requires_grad_()
        y = linear(leaf, parameters, TOKENS, sites)
        y.backward(dy)
        grads = [p.main_grad.clone() if main_grad else p.grad for p in parameters]
        found += [y.detach(), leaf.grad, *grads]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad = None
        state.finish_iteration()
    [arena] = state.arenas
    return SimpleNamespace(results=found, arena=arena, counts=state.last)


@pytest.mark.parametrize(
    ("recipe", "main_grad"),
    [
        *((recipe, (None, torch.float32)[i % 2]) for i, recipe in enumerate(ALL_RECIPES)),
        ("delayed", torch.float32),
        ("blockwise", torch.bfloat16),
        ("mxfp8", torch.float64),
    ],
)
def test_it_is_each_expert_alone_to_the_bit(recipe: str, main_grad: torch.dtype | None) -> None:
    """Results, gradients, scales, amaxes, health and counts, over two iterations."""
    together = train(grouped_linear, recipe, main_grad=main_grad)
    alone = train(in_turn, recipe, main_grad=main_grad)
    assert_all_same_bytes(together.results, alone.results)
    for what in ("scale", "last_amax", "last_nonfinite"):
        assert_same_bytes(getattr(together.arena, what), getattr(alone.arena, what), what)
    assert together.counts.nonfinite == alone.counts.nonfinite
    for kind in ("fp8_gemms", "hp_gemms"):  # one of six experts has no tokens, and nothing to multiply
        assert getattr(together.counts, kind) * 6 == getattr(alone.counts, kind) * 5


def test_one_call_of_the_backend_for_each_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts' fprop, dgrad and wgrad, but of the one without tokens; others that a plan has in high precision stay
    out of it."""
    calls: list[tuple[int, bool]] = []
    real = emulated.grouped_gemm

    def counted(a: Any, b: Any, outs: Any, *, add: bool = False, **options: Any) -> None:
        calls.append((len(outs), add))
        real(a, b, outs, add=add, **options)

    monkeypatch.setattr(emulated, "grouped_gemm", counted)
    train(grouped_linear, "blockwise", main_grad=torch.float32, iterations=1)
    assert calls == [(5, False), (5, False), (5, True)]
    calls.clear()
    train(grouped_linear, "blockwise", main_grad=None, iterations=1, overrides={"experts.2.*": "bf16"})
    assert calls == [(4, False), (4, False), (4, False)]


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_an_expert_planned_otherwise_is_multiplied_beside_the_others(recipe: str) -> None:
    options: Any = {"overrides": {"experts.2.*": "bf16", "experts.4.*": "mxfp8"}}
    together = train(grouped_linear, recipe, main_grad=torch.float32, **options)
    alone = train(in_turn, recipe, main_grad=torch.float32, **options)
    assert_all_same_bytes(together.results, alone.results)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
def test_nan_and_inf_stay_in_their_expert(recipe: str) -> None:
    x, weights, dy = matrices()
    results = []
    for bad in (False, True):
        _, sites = experts(recipe)
        leaf = x.clone()
        if bad:
            leaf[80:90], weights[2] = float("nan"), weights[2].clone()  # of expert 2, tokens 70 to 269
            weights[2][0, 0] = float("inf")
        leaf.requires_grad_()
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        y = grouped_linear(leaf, parameters, TOKENS, sites)
        y.backward(dy)
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad, [p.grad for p in parameters], sites))
    (y, dx, dw, _), (bad_y, bad_dx, bad_dw, sites) = results
    assert bad_y[80:90].isnan().all() and bad_dw[2].isnan().any()
    other = torch.ones(len(x), dtype=torch.bool)
    other[70:270] = False
    assert_same_bytes(bad_y[other], y[other])
    assert_same_bytes(bad_dx[other], dx[other])
    for e in (0, 1, 3, 4, 5):
        assert_same_bytes(bad_dw[e], dw[e], f"expert {e}")
    health = {site.plan.name: site.casts["input"].quantizers[0].slot for site in sites}
    counted = {name: float(slot.arena.rows[1, slot.index]) for name, slot in health.items()}
    assert [name for name, count in counted.items() if count] == ["experts.2.fc1"]


def test_recomputed_it_is_the_same() -> None:
    """Its forward, which ran twice with gradients, has counted twice what it cast."""

    def recomputed(*args: Any) -> torch.Tensor:
        return checkpoint(grouped_linear, *args, use_reentrant=False)

    plain, again = (
        train(linear, "delayed", main_grad=torch.float32, nan=True) for linear in (grouped_linear, recomputed)
    )
    assert_all_same_bytes(again.results, plain.results)
    assert_same_bytes(again.arena.scale, plain.arena.scale)
    assert_same_bytes(again.arena.last_amax, plain.arena.last_amax)
    assert again.counts.nonfinite == 2 * plain.counts.nonfinite > 0


def test_random_bits_do_not_depend_on_who_was_idle() -> None:
    """The second microbatch draws the same, whether or not an expert had tokens in the first."""
    x, weights, dy = matrices()
    found = []
    for linear in (grouped_linear, in_turn):
        _, sites = experts(Float8CurrentScaling(stochastic_rounding=True))
        for tokens in (TOKENS, TOKENS[::-1]):
            leaf = x.clone().requires_grad_()
            linear(leaf, [torch.nn.Parameter(weight) for weight in weights], tokens, sites).backward(dy)
        found.append(leaf.grad)
    assert_same_bytes(*found)


@pytest.mark.parametrize("main_grad", [False, True])
def test_a_rank_that_no_token_came_to(main_grad: bool) -> None:
    """Gradients of zeros, or main_grads as they were; every parameter has a gradient, for which its hooks wait."""
    _, weights, _ = matrices()
    parameters: list[Any] = [torch.nn.Parameter(weight) for weight in weights]
    for parameter in parameters if main_grad else ():
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.ones(N, K), False
    x = torch.empty(0, K, dtype=torch.bfloat16, requires_grad=True)
    y = grouped_linear(x, parameters, [0] * 6, experts("delayed")[1])
    y.sum().backward()
    assert y.shape == (0, N) and x.grad is not None and x.grad.shape == (0, K)
    for parameter in parameters:
        grad = parameter.main_grad if main_grad else parameter.grad
        assert parameter.grad is not None and grad.eq(float(main_grad)).all()


def test_without_gradients_nothing_is_saved_or_recorded() -> None:
    x, weights, _ = matrices()
    state, sites = experts("delayed")
    with torch.no_grad():
        y = grouped_linear(x, weights, TOKENS, sites, training=False)
        expected = in_turn(x, weights, TOKENS, experts("delayed")[1], training=False)
    assert_same_bytes(y, expected)
    assert not state.arenas[0].rows.any()


@pytest.mark.parametrize(("recipe", "linear"), [("tensorwise", in_turn), ("blockwise", grouped_linear)])
def test_autocast_changes_no_bit(recipe: str, linear: Any) -> None:
    """It would round the emulated products' operands, or refuse their dtypes."""
    plain = train(linear, recipe, main_grad=None)
    with torch.autocast("cpu", torch.bfloat16):
        cast = train(linear, recipe, main_grad=None)
    assert_all_same_bytes(cast.results, plain.results)


@pytest.mark.parametrize(
    ("tokens", "weights", "says"),
    [
        ((5.0, 0.0, 6.0), [(N, K)] * 3, "must be whole numbers"),
        ((5, 0, 6), [(K,)] * 3, "weights that are all"),
        ((5, 0, 7), [(N, K)] * 3, "sum to 12, and the input has 11 rows"),
        ((5, -1, 7), [(N, K)] * 3, "and the input has 11 rows"),
        ((5, 6), [(N, K)] * 3, "one of each for every expert"),
    ],
)
def test_what_does_not_fit_is_named(tokens: Any, weights: Any, says: str) -> None:
    _, sites = experts("tensorwise", count=3)
    with pytest.raises(ValueError, match=says):
        grouped_linear(torch.zeros(11, K), [torch.zeros(shape) for shape in weights], tokens, sites)

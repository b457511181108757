"""Tokens in codes: what moves them moves bytes, their gradients are ordinary, and products read the codes that came."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8 import quantize
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.linear.quantized_tokens import QuantizedTokens
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.numerics.rule import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, ROW, TENSOR, Rule
from megatron_fp8.plan.site_plan import has_token_scales
from megatron_fp8.recipe import Recipe
from megatron_fp8.state.fp8_state import Fp8State
from megatron_fp8.tensor import QuantizedSide
from tests.support.sites import RECIPES, make_site, randn

BY_TOKEN = ("rowwise", "blockwise", "blockwise-fp32", "mxfp8")
T, K, N = 150, 160, 96


def sided(x: torch.Tensor, recipe: Recipe | str, role: str = "input") -> tuple[QuantizedSide, Rule]:
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    side, rule = quantize(x, recipe, role).rowwise, recipe.rule(role)
    assert side is not None and rule is not None
    return side, rule


def coded(x: torch.Tensor, recipe: Recipe | str, role: str = "input") -> QuantizedTokens:
    return QuantizedTokens.of_side(*sided(x.reshape(-1, x.shape[-1]), recipe, role), x.shape, x.dtype)


@pytest.mark.parametrize("recipe", BY_TOKEN)
def test_codes_and_scales_come_back_as_they_went(recipe: str) -> None:
    x = randn(T, K, seed=1)
    x[3, 5], x[4, 6], x[5] = float("nan"), float("inf"), 0
    side, rule = sided(x, recipe)
    tokens = QuantizedTokens.of_side(side, rule, x.shape, x.dtype)
    assert (tokens.shape, tokens.dtype) == (x.shape, x.dtype)
    again = tokens.side
    assert_same_bytes(again.codes.view(torch.uint8), side.codes.view(torch.uint8))
    assert_same_bytes(again.scale_inv.view(torch.uint8), side.scale_inv.view(torch.uint8))
    assert (again.granularity, again.pow2, again.fmt) == (side.granularity, side.pow2, side.fmt)
    assert_same_bytes(tokens.dequantize(), side.dequantize(torch.bfloat16))
    of_scales = side.scale_inv.shape[1] * side.scale_inv.element_size()
    assert tokens.rows.numel() == T * (K + of_scales)


def test_scales_that_lie_as_the_native_backend_writes_them() -> None:
    """By columns: of up to 128 features there is one, contiguous to torch whatever its steps are."""
    for features in (96, 300):
        side, rule = sided(x := randn(T, features, seed=1), "blockwise")
        lying = torch.empty(side.scale_inv.shape[1], T).t().copy_(side.scale_inv)
        tokens = QuantizedTokens.of_side(replace(side, scale_inv=lying), rule, x.shape, x.dtype)
        assert_same_bytes(tokens.side.scale_inv, side.scale_inv, str(features))


def test_a_scale_that_spans_tokens_cannot_go_with_one() -> None:
    assert [has_token_scales(Rule(E4M3, cut)) for cut in (ROW, BLOCK_1X32, BLOCK_1X128)] == [True] * 3
    assert [has_token_scales(Rule(E4M3, cut)) for cut in (TENSOR, BLOCK_128X128)] == [False] * 2
    with pytest.raises(ValueError, match="a scale per tensor is not one token's"):
        coded(randn(8, 32, seed=0), "tensorwise")


MOVES: dict[str, Any] = {
    "index_select": lambda x, index: x.view(-1, K).index_select(0, index),
    "chunks": lambda x, index: torch.cat(x.view(-1, K).split([70, 0, 80])[::-1]),
    "equal chunks": lambda x, index: torch.cat(x.view(-1, K).split(50)[::-1]),
    "capacity": lambda x, index: x.view(3, 2, 25, K).transpose(0, 1).contiguous().flatten(0, 2),
    "whole slice": lambda x, index: x.view(-1, K)[:T],
    "dtypes": lambda x, index: x.to(torch.float32).to(torch.bfloat16).view(-1, K),
}


@pytest.mark.parametrize("move", MOVES)
def test_moved_they_are_what_moved_values_are_and_gradients_are_ordinary(move: str) -> None:
    x, index = randn(15, 10, K, seed=2), torch.randperm(T, generator=torch.Generator().manual_seed(1))
    tokens, values = coded(x, "mxfp8"), coded(x, "mxfp8").dequantize()
    tokens.requires_grad_(), values.requires_grad_()
    moved, expected = (MOVES[move](given, index) for given in (tokens, values))
    assert isinstance(moved, QuantizedTokens)
    assert_same_bytes(moved.dequantize(), expected)
    dy = randn(*expected.shape, seed=3)
    for result in (moved, expected):
        result.backward(dy)
    assert tokens.grad is not None and type(tokens.grad) is torch.Tensor
    assert_same_bytes(tokens.grad, values.grad)


def test_a_gradient_in_codes_goes_back_through_what_sums_tokens() -> None:
    """Megatron-Core's unpermute adds rows to where they came from, by scatter_add or index_add; a gradient reads them."""
    index = torch.tensor([2, 0, 0, 1, 2])
    dy = coded(randn(3, K, seed=4), "blockwise", "grad_output")
    for name in ("scatter_add", "index_add"):
        rows = torch.zeros(5, K, dtype=torch.bfloat16, requires_grad=True)
        seen: list[Any] = []
        same = rows.view_as(rows)
        same.register_hook(lambda grad, seen=seen: seen.append(grad) or grad.dequantize())
        out = torch.zeros(3, K, dtype=torch.bfloat16)
        if name == "scatter_add":
            out.scatter_add_(0, index[:, None].expand(-1, K), same)
        else:
            out.index_add_(0, index, same)
        out.to(torch.float32).to(torch.bfloat16).view(3, 1, K).backward(dy.view(3, 1, K))
        assert isinstance(seen[0], QuantizedTokens), name
        assert_same_bytes(rows.grad, dy.dequantize()[index])


def test_nothing_computes_with_them() -> None:
    tokens = coded(randn(4, K, seed=5), "blockwise")
    for compute in (lambda: tokens + 1, lambda: tokens.sum(), lambda: tokens @ tokens.t()):
        with pytest.raises(RuntimeError, match="dispatched in FP8"):
            compute()
    with pytest.raises(RuntimeError, match="features cannot be taken apart"):
        tokens.split(32, dim=1)
    with pytest.raises(RuntimeError, match="cannot be joined with"):
        torch.cat([tokens, torch.zeros(1, K, dtype=torch.bfloat16)])
    with pytest.raises(RuntimeError, match="cannot be seen as"):
        tokens.view(2, 2 * K)
    assert repr(tokens) == "QuantizedTokens([4, 160] of torch.bfloat16, e4m3 1x128 pow2, cpu)"


def derived_by_hand(x: QuantizedTokens, recipe: str, role: str) -> torch.Tensor:
    """Columnwise codes as docs/numerics.md says."""
    side = quantize(x.dequantize(torch.float32), RECIPES[recipe], role, "columnwise").columnwise
    assert side is not None
    return side.dequantize(torch.float64)


@pytest.mark.parametrize("recipe", BY_TOKEN)
def test_products_read_the_codes_that_came_and_wgrad_derived_ones(recipe: str) -> None:
    """Against products in float64: of the received codes, and of columnwise codes derived by hand."""
    x, w, dy = (
        coded(randn(T, K, seed=6), recipe),
        randn(N, K, seed=7),
        coded(randn(T, N, seed=8), recipe, "grad_output"),
    )
    site, backend = make_site(recipe)
    x.requires_grad_()
    weight = torch.nn.Parameter(w)
    y = fp8_linear(x, weight, None, site)
    y.view(T, N).backward(dy)
    wq = quantize(w, RECIPES[recipe], "weight", "both")
    assert wq.rowwise is not None and wq.columnwise is not None
    left, right = (side.dequantize(torch.float64) for side in (x.side, dy.side))
    exact = {
        "y": (y, left @ wq.rowwise.dequantize(torch.float64).t()),
        "dx": (x.grad, right @ wq.columnwise.dequantize(torch.float64).t()),
        "dw": (
            weight.grad,
            derived_by_hand(dy, recipe, "grad_output") @ derived_by_hand(x, recipe, "input").t(),
        ),
    }
    for name, (got, want) in exact.items():
        assert got is not None
        torch.testing.assert_close(
            got, want.bfloat16(), rtol=2**-7, atol=1e-5 * float(want.abs().max()), msg=name
        )
    assert backend.casts == [((T, K), "columnwise"), ((N, K), "both"), ((T, N), "columnwise")]


@pytest.mark.parametrize("recipe", BY_TOKEN)
def test_grouped_they_are_each_expert_alone(recipe: str) -> None:
    tokens = (70, 0, 1, 79)
    results = []
    for grouped in (True, False):
        state = Fp8State()
        sites = [make_site(recipe, state=state, name=f"e{e}", recording=False)[0] for e in range(4)]
        weights = [torch.nn.Parameter(randn(N, K, seed=20 + e)) for e in range(4)]
        x, dy = coded(randn(T, K, seed=6), recipe), coded(randn(T, N, seed=8), recipe, "grad_output")
        x.requires_grad_()
        if grouped:
            y = grouped_linear(x, weights, tokens, sites)
        else:
            parts = zip(x.split(list(tokens)), weights, sites, strict=True)
            y = torch.cat([fp8_linear(part, weight, None, site) for part, weight, site in parts])
        y.backward(dy)
        assert x.grad is not None
        results.append([y.detach(), x.grad, *(w.grad for w in weights)])
        if grouped:
            assert results[0][3].abs().max() == 0  # of the expert without tokens
    assert_all_same_bytes(*results)


def test_under_a_dispatch_mode_they_are_multiplied_as_they_are() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, w = coded(randn(T, K, seed=6), "blockwise"), randn(N, K, seed=7)
    plain = fp8_linear(x, w, None, make_site("blockwise", recording=False)[0])
    with FlopCounterMode(display=False):
        watched = fp8_linear(x, w, None, make_site("blockwise", recording=False)[0])
    assert_same_bytes(watched, plain)

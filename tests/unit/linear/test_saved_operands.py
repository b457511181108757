"""Hooks for saved tensors may give backward other tensors: those of the same values serve, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes
from megatron_fp8.kernels.cpu import emulation
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.mcore.layers.activation import store_swiglu_input_in_fp8
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.native_casts import native_casts_on_cpu
from tests.support.sites import RECIPES, make_site, randn

Unpack = Callable[[torch.Tensor], torch.Tensor]

TOKENS = (70, 0, 200, 17)
K, N = 160, 136
CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
needs_products = pytest.mark.skipif(emulation.inner_loop() is None, reason="no inner loop for products")


def dense(recipe: str, unpack: Unpack, **options: Any) -> list[torch.Tensor]:
    """Gradients of a linear whose saved tensors come back through a hook."""
    site, _ = make_site(recipe, recording=False, name="layers.3.fc1", **options)
    x = randn(sum(TOKENS), K, seed=1).requires_grad_()
    weight = torch.nn.Parameter(randn(N, K, seed=2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = fp8_linear(x, weight, None, site)
    y.backward(randn(sum(TOKENS), N, seed=3))
    return [x.grad, weight.grad]  # type: ignore[list-item]


def made_again(recipe: str, unpack: Unpack) -> list[torch.Tensor]:
    """The same, where backward makes the weight's codes again."""
    return dense(recipe, unpack, state=Fp8State(keeps_columnwise=False))


def experts(recipe: str, unpack: Unpack) -> list[torch.Tensor]:
    """The same of experts."""
    state = Fp8State()
    names = [f"layers.3.experts.{e}" for e in range(len(TOKENS))]
    sites = [make_site(recipe, state=state, name=name, recording=False)[0] for name in names]
    x = randn(sum(TOKENS), K, seed=1).requires_grad_()
    weights = [torch.nn.Parameter(randn(N, K, seed=10 + e)) for e in range(len(TOKENS))]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        y = grouped_linear(x, weights, TOKENS, sites)
    y.backward(randn(sum(TOKENS), N, seed=3))
    return [x.grad, *(weight.grad for weight in weights)]  # type: ignore[list-item]


def turned(t: torch.Tensor) -> torch.Tensor:
    """The same values, columns first."""
    return t.t().contiguous().t() if t.ndim == 2 else t.clone()


def with_gaps(t: torch.Tensor) -> torch.Tensor:
    """The same values, none beside the other."""
    bits = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
    return torch.stack([bits, bits.flip(0) if bits.ndim else bits], -1)[..., 0].view(t.dtype)


@needs_products
@pytest.mark.parametrize(
    ("way", "recipe", "unpack"),
    [
        (dense, "mxfp8", turned),
        (dense, "delayed", with_gaps),
        (made_again, "blockwise", with_gaps),
        (experts, "mxfp8", turned),
        (experts, "blockwise", with_gaps),
        (experts, "delayed", torch.clone),
    ],
)
def test_values_that_lie_otherwise_are_the_same_values(recipe: str, way: Any, unpack: Unpack) -> None:
    assert_all_same_bytes(way(recipe, unpack), way(recipe, lambda t: t))


class Own(torch.Tensor):
    """A user's kind of tensor, which C does not read."""


def test_tensors_of_another_class_are_read_by_torch() -> None:
    """Sums in another order than C's, so that they are equal but for the last bit."""
    found = experts("blockwise", lambda t: t.as_subclass(Own))
    for one, other in zip(found, experts("blockwise", lambda t: t), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


BROKEN: dict[str, Unpack] = {
    "another dtype": lambda t: t.to(torch.float64),
    "its bytes": lambda t: t.reshape(-1).view(torch.uint8),
    "fewer": lambda t: t.reshape(-1)[:-1],
    "another shape": lambda t: t.reshape(1, 1, *t.shape),
    "no memory": lambda t: t.to("meta"),
}


@pytest.mark.parametrize(
    ("way", "of_codes", "broken"),
    [
        *((dense, True, broken) for broken in BROKEN),
        (dense, False, "fewer"),
        (made_again, True, "another dtype"),
        (experts, True, "no memory"),
        (experts, False, "another shape"),
    ],
)
def test_others_are_refused(way: Any, of_codes: bool, broken: str) -> None:
    """Before, C read past their ends, or crashed."""

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return BROKEN[broken](t) if (t.dtype in CODES) == of_codes else t

    with pytest.raises(ValueError, match=r"layers.3.* was saved for backward, and .* came back: an unpack"):
        way("blockwise", unpack)


def test_an_input_that_swiglu_has_stored() -> None:
    x = randn(64, 256, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.reshape(-1)[1:]):
        y = store_swiglu_input_in_fp8(lambda *args: pytest.fail("not stored"), x, None, True)
    with pytest.raises(ValueError, match=r"SwiGLU: float8_e4m3fn \[64, 256\] on cpu was saved"):
        y.backward(torch.ones_like(y))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_native_codes_come_back_with_their_zeros(recipe: str) -> None:
    """What the cast fills up behind the last token is saved with the codes, so a copy has it too."""
    sizes = set()

    def copied(saved: torch.Tensor) -> torch.Tensor:
        sizes.add(saved.shape)
        return torch.empty(saved.shape, dtype=saved.dtype).copy_(saved)

    found = []
    for unpack in (copied, lambda saved: saved):
        site = GemmSite(fp8_site("a", 0, RECIPES[recipe], "native", "test"), Fp8State(), None)
        x, weight = randn(131, 256, seed=1).requires_grad_(), torch.nn.Parameter(randn(128, 256, seed=2))
        with native_casts_on_cpu(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = fp8_linear(x, weight, None, site)
            y.backward(randn(131, 128, seed=3))
        found.append((y.detach(), x.grad, weight.grad))
    assert torch.Size((256, {"blockwise": 256, "mxfp8": 160}.get(recipe, 144))) in sizes
    assert_all_same_bytes(*found)

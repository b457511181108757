"""SwiGLU with its input stored in scaled FP8: against autograd of the plain formula at the values that were stored."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.support.fp8_gpt import MOE, training
from benchmarks.support.launched_kernels import launched
from benchmarks.support.ranks import Layout, RankPool
from megatron_fp8.kernels.lazy_tensor import LazyTensor
from megatron_fp8.mcore.layers import activation
from megatron_fp8.mcore.layers.activation import store_expert_swiglu_input_in_fp8, store_swiglu_input_in_fp8
from megatron_fp8.numerics.formats import E4M3
from megatron_fp8.quantizer import quantize
from megatron_fp8.recipe import Float8BlockScaling


def never(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise AssertionError("Megatron-Core's own was called")


swiglu = functools.partial(store_swiglu_input_in_fp8, never)
expert_swiglu = functools.partial(store_expert_swiglu_input_in_fp8, never)


def formula(x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    gate, up = x.double().chunk(2, -1)
    y = F.silu(gate) * up
    return y if weights is None else y * weights.double()


def stored(x: torch.Tensor) -> torch.Tensor:
    """x as backward sees it: 1x128 blocks with power-of-two scales."""
    return (
        quantize(x.reshape(-1, x.shape[-1]), Float8BlockScaling(), "input")
        .dequantize(torch.float32)
        .view(x.shape)
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "weighted"),
    [
        ((5, 2, 256), torch.bfloat16, False),
        ((7, 126), torch.float32, False),
        ((1, 2), torch.float32, True),
        ((129, 688), torch.bfloat16, True),
        ((0, 64), torch.bfloat16, True),
    ],
)
def test_forward_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(shape[0], 1, generator=generator).requires_grad_() if weighted else None
    assert_right(x, weights, dtype, store=True)


@contextmanager
def between_fp8_linears() -> Iterator[None]:
    """As in an MLP both linears of which make codes by kernels."""
    linear = SimpleNamespace(makes_codes_of=lambda role: True)
    token = activation._mlp.set(SimpleNamespace(linear_fc1=linear, linear_fc2=linear))
    try:
        yield
    finally:
        activation._mlp.reset(token)


@pytest.mark.parametrize("store", [False, True], ids=["kept", "stored"])
@pytest.mark.parametrize(("shape", "weighted"), [((5, 2, 128), False), ((7, 62), True), ((0, 64), True)])
def test_deferred(shape: tuple[int, ...], weighted: bool, store: bool) -> None:
    """By kernels: the value and all gradients, none of which is written before it is read; bfloat16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).bfloat16().requires_grad_()
    weights = torch.rand(shape[0], 1, generator=generator).requires_grad_() if weighted else None
    with between_fp8_linears(), np.errstate(all="ignore"), launched() as calls:
        y = assert_right(x, weights, torch.bfloat16, store=store)
    assert isinstance(y, LazyTensor) and isinstance(x.grad, LazyTensor) and x.grad.source is None
    wanted = {"write_values of swiglu": 1, "write_values of swiglu_grad": 1}
    wanted |= {"quantize_tiles": 1} if store else {}
    wanted |= {"_weight_grad": 1} if weighted else {}
    assert calls == (wanted if x.numel() else {}), calls


def test_what_is_not_computed_by_the_next_linear() -> None:
    """With a bias, or to be offloaded, Megatron-Core's own runs; and so it does for BF16 linears."""
    x = torch.zeros(2, 4)
    with between_fp8_linears():
        for arguments in ((x, torch.zeros(4), False, False), (x, None, False, True)):
            with pytest.raises(AssertionError, match="Megatron-Core's own"):
                swiglu(*arguments)
        with pytest.raises(AssertionError, match="Megatron-Core's own"):
            expert_swiglu(x, torch.zeros(4), torch.ones(2, 1))
        activation.running_mlp().linear_fc2.makes_codes_of = lambda role: False
        with pytest.raises(AssertionError, match="Megatron-Core's own"):
            swiglu(x, None)


def assert_right(
    x: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype, *, store: bool
) -> torch.Tensor:
    """y, dx and dweights against autograd of the formula in float64, backward at what was stored. Returns y."""
    generator = torch.Generator().manual_seed(2)
    shape = x.shape
    y = swiglu(x, None, store) if weights is None else expert_swiglu(x, None, weights, store)
    dy = torch.randn(y.shape, generator=generator).to(dtype)
    y.backward(dy)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    assert y.dtype == dtype and y.shape == (*shape[:-1], shape[-1] // 2)
    assert torch.allclose(y.double(), formula(x.detach(), weights), rtol=tolerance, atol=1e-6)
    seen = (stored(x.detach()) if store else x.detach().float()).requires_grad_()
    known = None if weights is None else weights.detach().clone().requires_grad_()
    formula(seen, known).backward(dy.double())
    assert x.grad is not None and x.grad.dtype == dtype
    assert torch.allclose(x.grad.float(), seen.grad, rtol=2 * tolerance, atol=1e-5)
    if weights is not None:
        assert torch.allclose(weights.grad, known.grad, rtol=1e-4, atol=1e-5)
    return y


def test_a_second_derivative_is_an_error() -> None:
    x = torch.randn(4, 256, requires_grad=True)
    (dx,) = torch.autograd.grad(swiglu(x, None, True).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.sum().backward()


def test_bias_is_added_before() -> None:
    x, bias = torch.randn(4, 256, requires_grad=True), torch.randn(256, requires_grad=True)
    swiglu(x, bias, True).sum().backward()
    whole = (x.detach() + bias.detach()).requires_grad_()
    swiglu(whole, None, True).sum().backward()
    assert torch.equal(x.grad, whole.grad) and torch.allclose(bias.grad, whole.grad.sum(0))


@pytest.mark.parametrize("magnitude", [2.0**-20, 1.0, 2.0**12])
def test_small_and_large_values_survive(magnitude: float) -> None:
    """Without a scale E4M3 ends at 2^-9 and 448; within a block of one magnitude the error is that of 3 bits."""
    x = (torch.rand(16, 256) + 0.5).mul(magnitude).requires_grad_()
    swiglu(x, None, True).sum().backward()
    exact = x.detach().double().requires_grad_()
    formula(exact, None).sum().backward()
    error = (x.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert float(error) < 0.05


def test_one_byte_a_value_is_kept() -> None:
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        swiglu(torch.randn(8, 256, requires_grad=True), None, True)
    assert [t.dtype for t in kept] == [E4M3.dtype, torch.float32]
    assert [t.numel() for t in kept] == [8 * 256, 8 * 2]


def test_without_the_option_megatron_computes() -> None:
    def original(*args: Any) -> str:
        return f"original {len(args)}"

    assert store_swiglu_input_in_fp8(original, 1, None, False, True) == "original 4"
    assert store_expert_swiglu_input_in_fp8(original, 1, None, 2) == "original 4"


@pytest.mark.parametrize("fields", [{}, {**MOE, "moe_shared_expert_intermediate_size": 256}])
def test_megatron_calls_it(ranks: RankPool, fields: dict[str, Any]) -> None:
    """In dense layers, experts and shared experts alike: gradients move a little, losses of the first step do not."""
    fused = {**fields, "bias_activation_fusion": True}
    plain = training(ranks, 1, Layout(), "mxfp8", fused)[0]
    fp8 = training(ranks, 1, Layout(), "mxfp8", {**fused, "activation_func_fp8_input_store": True})[0]
    assert fp8.losses == pytest.approx(plain.losses, rel=1e-4)
    assert fp8.norms != plain.norms and fp8.norms == pytest.approx(plain.norms, rel=2e-2)

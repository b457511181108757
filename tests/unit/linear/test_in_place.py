"""What a linear returns may be changed in place, and a second derivative is right or an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.nn import Fp8Linear, fp8_matmul
from tests.support.sites import make_site, randn

Then = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What a model does with y; the second tensor is the input of the linear, as wide as y."""

IN_PLACE: dict[str, tuple[Then, Then]] = {
    "relu": (lambda y, x: nn.functional.relu(y, inplace=True), lambda y, x: nn.functional.relu(y)),
    "residual": (lambda y, x: y.add_(x), lambda y, x: y + x),
    "scaled": (lambda y, x: y.mul_(0.125), lambda y, x: y * 0.125),
    "after a use": (lambda y, x: y.sum() * y.add_(x), lambda y, x: y.sum() * (y + x)),
    "before a use": (lambda y, x: y.add_(x) * y.sum(), lambda y, x: (y + x) * (y + x).sum()),
    "a part": (
        lambda y, x: (y[..., :8].mul_(2), y)[1],
        lambda y, x: torch.cat([y[..., :8] * 2, y[..., 8:]], -1),
    ),
}


def outcome(call: Callable[[torch.Tensor], torch.Tensor], then: Then, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = then(call(leaf), leaf)
    (y.float() * torch.arange(y.numel()).view(y.shape)).sum().backward()
    assert leaf.grad is not None
    return [y.detach(), leaf.grad]


@pytest.mark.parametrize(
    ("then", "how"),
    [
        *((then, "eager") for then in IN_PLACE),
        *(("residual", how) for how in ("reentrant", "not reentrant", "compiled")),
    ],
)
def test_in_place_and_out_of_place_are_the_same_bits(then, how):
    torch.manual_seed(0)
    linear = Fp8Linear(32, 32, recipe="mxfp8")
    call, torch_call = linear.__call__, {"eager": linear.__call__}
    if how.endswith("reentrant"):
        torch_call[how] = lambda x: checkpoint(linear, x, use_reentrant=how == "reentrant")
    if how == "compiled":
        torch._dynamo.reset()
        torch_call[how] = torch.compile(linear, backend="aot_eager", fullgraph=True)
    mine, plain = IN_PLACE[then]
    x = randn(3, 5, 32, seed=1, dtype=torch.float32)
    assert_all_same_bytes(outcome(torch_call[how], mine, x), outcome(call, plain, x), then)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("delayed", (24,)),
        ("delayed", (5, 24)),
        ("no-input", (2, 3, 24)),
        ("blockwise-fp32", (2, 1, 3, 24)),
        ("delayed", (0, 24)),
    ],
)
def test_no_result_is_a_view(name, shape, bias):
    site, _ = make_site(name)
    x, w = randn(*shape, seed=1).requires_grad_(), randn(40, 24, seed=2).requires_grad_()
    b = torch.ones(40, dtype=torch.bfloat16, requires_grad=True) if bias else None
    y = fp8_linear(x, w, b, site)
    assert not y._is_view() and y.is_contiguous()
    y.mul_(2).sum().backward()
    assert x.grad is not None and w.grad is not None


def test_one_product_in_place():
    a, b = randn(3, 4, 32, seed=1).requires_grad_(), randn(32, 24, seed=2).requires_grad_()
    y = fp8_matmul(a, b)
    y *= 2
    y.sum().backward()
    expected = torch.autograd.grad((fp8_matmul(a, b) * 2).sum(), [a, b])
    assert_same_bytes(a.grad, expected[0])
    assert_same_bytes(b.grad, expected[1])


@pytest.mark.parametrize("loss", [torch.sum, lambda y: y.square().sum()], ids=["constant", "varying"])
def test_a_second_derivative_is_an_error(loss):
    """Also where the gradient that comes in is constant, and only the weight's part would be missing."""
    linear = Fp8Linear(32, 32)
    x = torch.randn(4, 32, requires_grad=True)
    (dx,) = torch.autograd.grad(loss(linear(x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (linear(x).sum() + dx.square().sum()).backward()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.functional.hessian(lambda x: loss(linear(x)), x.detach())


def test_gradients_of_a_graph_that_is_kept_are_the_same():
    """create_graph by itself changes nothing, and refuses nothing."""
    linear, x = Fp8Linear(32, 32), torch.randn(4, 32, requires_grad=True)
    plain, kept = (
        torch.autograd.grad(linear(x).sum(), x, create_graph=create)[0] for create in (False, True)
    )
    assert_same_bytes(kept.detach(), plain)
    with pytest.raises(RuntimeError, match="cannot be batched"):
        torch.autograd.grad(linear(x), x, torch.ones(2, 4, 32), is_grads_batched=True)

"""torch's products of BF16 on CPUs without instructions for them, given to float32; tried on every processor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_fp8.kernels import torch_products
from megatron_fp8.kernels.cpu import emulation
from tests.support.command import run

BF16 = torch.bfloat16


@pytest.fixture
def replaced() -> Iterator[None]:
    library = torch_products.register({BF16})
    yield
    library._destroy()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The replaced operations that were called and had operands of BF16."""
    found = []

    def noted(name, function):
        def call(*args, **kwargs):
            found.append(name)
            return function(*args, **kwargs)

        return call

    kept = {name: noted(name, function) for name, function in torch_products._FUNCTIONS.items()}
    monkeypatch.setattr(torch_products, "_FUNCTIONS", kept)
    return found


def drawn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def once_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """BF16, and as near to the exact value as one rounding of a float32 sum is."""
    assert found.dtype is BF16
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 * 1.01, atol=1e-5)


SHAPES = [(1, 64, 32), (33, 7, 65), (300, 513, 129), (128, 256, 512), (0, 4, 3), (3, 0, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_rounded_once(calls, replaced, shape, turned):
    m, k, n = shape
    a, b = drawn(m, k), drawn(n, k).t() if turned else drawn(k, n)
    bias, wide = drawn(n), drawn(m, n)
    exact = a.double() @ b.double()
    once_rounded(a @ b, exact)
    once_rounded(torch.addmm(bias, a, b), bias.double() + exact)
    once_rounded(torch.addmm(wide, a, b, beta=0.5, alpha=-2), 0.5 * wide.double() - 2 * exact)
    once_rounded(torch.addmm(torch.full((n,), torch.nan, dtype=BF16), a, b, beta=0), exact)
    once_rounded(torch.bmm(a[None], b[None])[0], exact)
    once_rounded(torch.baddbmm(wide[None], a[None], b[None], beta=0, alpha=3)[0], 3 * exact)
    assert calls == ["mm", "addmm", "addmm", "addmm", "bmm", "baddbmm"]


def test_linears_and_their_gradients(calls, replaced):
    linear = torch.nn.Linear(96, 40, dtype=BF16)
    x = drawn(5, 7, 96).requires_grad_()
    out = linear(x)
    gradient = drawn(5, 7, 40, seed=3)
    out.backward(gradient)
    flat, sent = x.detach().double().flatten(0, 1), gradient.double().flatten(0, 1)
    once_rounded(out.detach().flatten(0, 1), flat @ linear.weight.double().t() + linear.bias.double())
    once_rounded(x.grad.flatten(0, 1), sent @ linear.weight.double())
    once_rounded(linear.weight.grad, sent.t() @ flat)
    assert sorted(calls) == ["addmm", "mm", "mm"]


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "given": {"attn_mask": torch.ones(40, 40).tril() > 0},
}


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_attention(calls, replaced, mask):
    q, k, v = drawn(2, 4, 40, 32, seed=1), drawn(2, 2, 40, 32, seed=2), drawn(2, 2, 40, 32, seed=3)
    sent = drawn(2, 4, 40, 32, seed=4)
    found, exact = [], []
    for gradients, dtype in ((found, BF16), (exact, torch.float64)):
        own = [x.detach().clone().to(dtype).requires_grad_() for x in (q, k, v)]
        F.scaled_dot_product_attention(*own, enable_gqa=True, **MASKS[mask]).backward(sent.to(dtype))
        gradients.extend(x.grad for x in own)
    assert calls == ["_scaled_dot_product_flash_attention_for_cpu_backward"]
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype is BF16
        assert (mine.double() - theirs).norm() < 2**-7 * theirs.norm()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.complex64], ids=str
)
def test_other_dtypes_are_torchs_to_the_bit(dtype):
    a, b = (drawn(*shape, dtype=torch.float32).mul(8).to(dtype) for shape in ((9, 33), (33, 17)))
    expected = a @ b, torch.addmm(a @ b, a, b), torch.bmm(a[None], b[None])
    library = torch_products.register({BF16})
    found = a @ b, torch.addmm(a @ b, a, b), torch.bmm(a[None], b[None])
    library._destroy()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is dtype and torch.equal(mine, theirs)


def test_float16_is_replaced_by_itself():
    """Beside BF16, too."""
    a, b = drawn(33, 65, dtype=torch.float16), drawn(65, 17, dtype=torch.float16)
    library = torch_products.register({torch.float16, BF16})
    found = a @ b, torch.bmm(a[None], b[None])[0], torch.addmm(a[0, :17], a, b)
    short = a.to(BF16) @ b.to(BF16)
    library._destroy()
    exact = a.double() @ b.double()
    for mine, right in zip(found, (exact, exact, a[0, :17].double() + exact), strict=True):
        assert mine.dtype is torch.float16
        torch.testing.assert_close(mine.double(), right, rtol=2**-11 * 1.01, atol=1e-5)
    once_rounded(short, a.to(BF16).double() @ b.to(BF16).double())


WRONG = {
    "shapes": lambda: drawn(3, 4) @ drawn(3, 4),
    "dtypes": lambda: drawn(3, 4) @ drawn(4, 3, dtype=torch.float32),
    "bias": lambda: torch.addmm(drawn(5), drawn(3, 4), drawn(4, 3)),
    "dtype of the bias": lambda: torch.addmm(drawn(3, dtype=torch.float32), drawn(3, 4), drawn(4, 3)),
    "dtypes of batches": lambda: torch.bmm(drawn(1, 3, 4), drawn(1, 4, 3, dtype=torch.float32)),
    "batches": lambda: torch.bmm(drawn(2, 3, 4), drawn(1, 4, 3)),
    "strides of groups": lambda: torch._grouped_mm(
        drawn(8, 30), drawn(2, 30, 8), offs=torch.tensor([4, 8], dtype=torch.int32)
    ),
    "result of groups": lambda: torch._grouped_mm(
        drawn(8, 32), drawn(2, 32, 8), offs=torch.tensor([4, 8], dtype=torch.int32), out_dtype=torch.float32
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_torchs(wrong):
    with pytest.raises(RuntimeError) as expected:
        WRONG[wrong]()
    library = torch_products.register({BF16})
    with pytest.raises(RuntimeError) as found:
        WRONG[wrong]()
    library._destroy()
    assert str(found.value) == str(expected.value)


def test_what_calls_products(calls, replaced):
    """Modes, transforms and other threads."""
    a, b = drawn(4, 6, 8), drawn(4, 8, 5)
    exact = a.double() @ b.double()
    once_rounded(torch.vmap(torch.mm)(a, b), exact)
    with torch.inference_mode():
        once_rounded(a[0] @ b[0], exact[0])
    with torch.autocast("cpu", BF16):
        once_rounded(a[0].float() @ b[0].float(), exact[0])
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(a[1] @ b[1]))
    thread.start()
    thread.join()
    once_rounded(found[0], exact[1])
    assert calls == ["bmm", "mm", "mm", "mm"]


def test_what_a_kernel_calls_is_nobody_elses_to_see(calls, replaced):
    """Where C++ calls it, as in backward, classes of tensors and modes saw the calls inside, and changed them."""

    class Doubling(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            found = super().__torch_function__(function, types, args, kwargs or {})
            return found * 2 if function.__name__ in ("to", "t", "matmul", "mm") else found

    x = drawn(6, 40).requires_grad_()
    weight = torch.nn.Parameter(drawn(8, 40).as_subclass(Doubling))
    F.linear(x, weight).as_subclass(torch.Tensor).sum().backward()
    assert x.grad is not None and "mm" in calls
    once_rounded(x.grad, torch.ones(6, 8).double() @ weight.detach().as_subclass(torch.Tensor).double())
    seen = drawn(300, 300, dtype=torch.float16).mul_(100)
    with torch.autocast("cpu", torch.float16):
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        found = torch.ops.aten.mm.default.redispatch(key, seen.to(BF16), seen.to(BF16))
    assert found.isfinite().all()


def test_alpha_and_beta_of_every_kind(replaced):
    """alpha multiplies the sum, and not an operand, which leaves float32's range."""
    high, low = torch.full((1, 8, 16), 2e38, dtype=BF16), torch.full((1, 16, 8), 1e-30, dtype=BF16)
    zero, nan = torch.zeros(8, dtype=BF16), torch.full((1, 8, 16), torch.nan, dtype=BF16)
    exact = 2 * (high.double() @ low.double())
    once_rounded(torch.baddbmm(zero, high, low, alpha=2), exact)
    once_rounded(torch.addmm(zero, high[0], low[0], alpha=2), exact[0])
    assert torch.baddbmm(zero, nan, low, alpha=0).isnan().all()
    assert torch.addmm(zero, nan[0], low[0], alpha=0).isnan().all()
    one = torch.ones(8, 8, dtype=BF16)
    for yes in (True, 1, 1.0):
        assert torch.equal(torch.addmm(one, one, one, beta=yes, alpha=yes), one * 9)
        assert torch.equal(torch.baddbmm(one, one[None], one[None], beta=yes, alpha=yes), one[None] * 9)


@pytest.mark.skipif(
    emulation.reason() is not None, reason="torch's float32 products may add in another order"
)
def test_a_row_has_the_same_bits_alone_as_among_others(replaced):
    """A token that is decoded gets what it would get in training."""
    x, weight = drawn(64, 256), drawn(128, 256)
    assert torch.equal(torch.cat([row[None] @ weight.t() for row in x]), x @ weight.t())


def test_products_of_groups(calls, replaced):
    """Of experts, and their gradients."""
    a, b = drawn(64, 32).requires_grad_(), drawn(4, 32, 48).requires_grad_()
    ends = torch.tensor([16, 16, 50, 64], dtype=torch.int32)
    out = torch._grouped_mm(a, b, offs=ends)
    sent = drawn(64, 48, seed=2)
    out.backward(sent)
    assert a.grad is not None and b.grad is not None and set(calls) == {"_grouped_mm"}
    first = 0
    for last, weight, gradient in zip(ends.tolist(), b.detach().double(), b.grad, strict=True):
        rows = slice(first, last)
        once_rounded(out[rows].detach(), a.detach()[rows].double() @ weight)
        once_rounded(a.grad[rows], sent[rows].double() @ weight.t())
        once_rounded(gradient, a.detach()[rows].double().t() @ sent[rows].double())
        first = last


@pytest.mark.parametrize("slow", [(), (torch.float16,), (torch.float16, BF16)], ids=str)
def test_only_slow_products_are_replaced_and_once(monkeypatch, calls, slow):
    of: set[torch.dtype] = set()
    monkeypatch.setattr(torch_products, "_replaced", of)
    monkeypatch.setattr(torch_products, "cpu_multiplies", lambda dtype: dtype not in slow)
    for function in (torch_products.replace_slow, torch_products._registered):
        function.cache_clear()
    try:
        for dtype in (torch.float16, BF16, BF16):
            assert torch_products.replace_slow(dtype) == (dtype in slow)
        assert of == set(slow)
        for dtype in (torch.float16, BF16):
            a = torch.ones(8, 8, dtype=dtype)
            assert torch.equal(a @ a, 8 * a)
        assert calls == ["mm"] * len(slow)
    finally:
        if slow:
            torch_products._registered()._destroy()
        for function in (torch_products.replace_slow, torch_products._registered):
            function.cache_clear()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"dtype=torch.float32 has no slow products: give torch.bfloat16 or"):
        torch_products.replace_slow(torch.float32)


ALONE = """
import torch, megatron_fp8, megatron_fp8.mcore.spec
from megatron_fp8.kernels import torch_products
from megatron_fp8.kernels.cpu import emulation
assert not torch_products._replaced
torch_products.cpu_multiplies = lambda dtype: False
assert torch_products.replace_slow()
print((torch.ones(2, 2).bfloat16() @ torch.ones(2, 2).bfloat16()).sum().item())
"""


def test_nothing_is_said_of_it_and_an_import_replaces_nothing(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    done = run(tmp_path / "alone.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "8.0\n", "")

"""torch's products of BF16 on CPUs without instructions for them, given to float32; tried on every processor."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_fp8.kernels import torch_products
from tests.support.command import run

BF16 = torch.bfloat16


@pytest.fixture
def replaced() -> Iterator[None]:
    library = torch_products.register(BF16)
    yield
    library._destroy()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The replaced operations that were called and had operands of BF16."""
    found = []

    def noted(name, function):
        def call(dtype, kernel, keys, *args, **kwargs):
            if any(isinstance(x, torch.Tensor) and x.dtype == dtype for x in args):
                found.append(name)
            return function(dtype, kernel, keys, *args, **kwargs)

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
    library = torch_products.register(BF16)
    found = a @ b, torch.addmm(a @ b, a, b), torch.bmm(a[None], b[None])
    library._destroy()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is dtype and torch.equal(mine, theirs)


def test_float16_is_replaced_by_itself():
    """Beside BF16, too: each knows its own."""
    a, b = drawn(33, 65, dtype=torch.float16), drawn(65, 17, dtype=torch.float16)
    libraries = [torch_products.register(torch.float16), torch_products.register(BF16)]
    found = a @ b, torch.bmm(a[None], b[None])[0], torch.addmm(a[0, :17], a, b)
    short = a.to(BF16) @ b.to(BF16)
    for library in reversed(libraries):
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
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_torchs(wrong):
    with pytest.raises(RuntimeError) as expected:
        WRONG[wrong]()
    library = torch_products.register(BF16)
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


@pytest.mark.parametrize("slow", [False, True])
def test_only_slow_products_are_replaced_and_once(monkeypatch, calls, slow):
    kept: list[torch.library.Library] = []
    monkeypatch.setattr(torch_products, "_KEPT", kept)
    monkeypatch.setattr(torch_products, "cpu_multiplies", lambda dtype: not slow)
    torch_products.replace_slow.cache_clear()
    try:
        assert [torch_products.replace_slow(), torch_products.replace_slow()] == [slow, slow]
        assert len(kept) == slow
        assert torch.equal(
            torch.ones(2, 3, dtype=BF16) @ torch.ones(3, 2, dtype=BF16), torch.full((2, 2), 3.0).to(BF16)
        )
        assert calls == ["mm"] * slow
    finally:
        for library in kept:
            library._destroy()
        torch_products.replace_slow.cache_clear()


ALONE = """
import torch, megatron_fp8, megatron_fp8.mcore.spec
from megatron_fp8.kernels import torch_products
assert not torch_products._KEPT
torch_products.cpu_multiplies = lambda dtype: False
assert torch_products.replace_slow()
print((torch.ones(2, 2).bfloat16() @ torch.ones(2, 2).bfloat16()).sum().item())
"""


def test_nothing_is_said_of_it_and_an_import_replaces_nothing(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    done = run(tmp_path / "alone.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "8.0\n", "")

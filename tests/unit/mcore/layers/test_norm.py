"""RMSNorm and LayerNorm: against float64, in every dtype, with what they save and what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.support.compare import assert_same_bytes
from benchmarks.support.launched_kernels import launched
from megatron_fp8 import kernels
from megatron_fp8.kernels.lazy_tensor import LazyTensor, materialize
from megatron_fp8.mcore.layers.norm import Norm, rms_norm
from tests.support.saved_tensors import saved

SHAPES = [(1, 1), (7, 129), (3, 5, 64), (1000, 8), (0, 16)]


def config(**fields: Any) -> Any:
    base = {
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": False,
        "params_dtype": torch.float32,
        "use_cpu_initialization": True,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**(base | fields))


def written_out(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def values_and_gradients(function: Any, x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight)
    y.backward(grad)
    assert x.grad is not None and weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_equals_the_formula_in_float64(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, grad = (torch.randn(size).double() for size in (shape, shape[-1:], shape))
    got = values_and_gradients(lambda a, w: rms_norm(a, w, 1e-5), x, weight, grad)
    want = values_and_gradients(lambda a, w: written_out(a, w, 1e-5), x, weight, grad)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 129), (0, 16)], ids=str)
def test_a_deferred_norm_has_the_same_bits(shape: tuple[int, ...], centred: bool) -> None:
    """Value and gradients, where kernels run: what is kept for backward does not depend on who computes the value."""
    torch.manual_seed(0)
    x, weight, grad = (t.bfloat16() for t in (torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)))
    with mock.patch.object(kernels, "run_on", return_value=True), launched() as calls:
        both = [
            values_and_gradients(lambda a, w, u=u: rms_norm(a, w, 0.01, centred, deferred=u), x, weight, grad)
            for u in (True, False)
        ]
    assert isinstance(both[0][0], LazyTensor) and both[0][0].source is not None
    assert calls == ({"_row_rstd": 2} if x.numel() else {})
    for what, mine, theirs in zip(("value", "dx", "dw"), *both, strict=True):
        assert_same_bytes(materialize(mine), theirs, what)
    plain = values_and_gradients(lambda a, w: rms_norm(a, w, 0.01, centred), x, weight, grad)
    for found, expected in zip(both[1], plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-4)  # the statistic's order of sums


@pytest.mark.parametrize("centred", [False, True])
def test_rms_norm_gradcheck(centred: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6).double().requires_grad_(), torch.randn(6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, w: rms_norm(a, w, 0.1, centred), (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_is_as_exact_as_the_dtype_allows(dtype: torch.dtype) -> None:
    """Within one rounding of float64's answer: the arithmetic inside is float32."""
    torch.manual_seed(0)
    x, weight, grad = torch.randn(64, 96).to(dtype), torch.randn(96).to(dtype), torch.randn(64, 96).to(dtype)
    got = values_and_gradients(lambda a, w: rms_norm(a, w, 1e-5), x, weight, grad)
    want = values_and_gradients(
        lambda a, w: written_out(a, w, 1e-5), x.double(), weight.double(), grad.double()
    )
    ulp = torch.finfo(dtype).eps
    for g, w, floor in zip(got, want, (1e-6, 1e-6, 1e-5), strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), w, rtol=0.51 * ulp + 4e-6, atol=floor + ulp * ulp)


def test_only_the_input_and_one_number_a_row_are_saved() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    for normalization, rows in (("RMSNorm", 1), ("LayerNorm", 2)):
        module = Norm(config(normalization=normalization, params_dtype=torch.bfloat16), 64)
        kept = saved(lambda module=module: module(x))
        parameters = {p.data_ptr() for p in module.parameters()}
        extra = [t for t in kept if t.data_ptr() not in parameters | {x.data_ptr()}]
        assert sum(t.numel() for t in extra) == rows * 32
        assert any(t.data_ptr() == x.data_ptr() for t in kept)
    assert weight.grad is None


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_unneeded_gradients_are_not_computed(
    needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(4, 8, requires_grad=needs[0]), torch.randn(8, requires_grad=needs[1])
    y = rms_norm(x, weight)
    used: list[str] = []
    addcmul = torch.addcmul
    monkeypatch.setattr(torch, "addcmul", lambda *a, **k: used.append("dx") or addcmul(*a, **k))
    y.sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needs
    assert used == (["dx"] if needs[0] else [])


def test_rows_that_are_not_finite_stay_in_their_row() -> None:
    x = torch.randn(4, 8)
    x[0, 3], x[1, 2], x[2] = float("nan"), float("inf"), 0.0
    y = rms_norm(x, torch.ones(8))
    assert y[0].isnan().all()
    assert y[1, 2].isnan() and (y[1, [0, 1, 3, 4, 5, 6, 7]] == 0).all()
    assert (y[2] == 0).all() and y[3].isfinite().all()


def test_large_rows_do_not_overflow_in_float16() -> None:
    x = torch.full((2, 64), 60000.0, dtype=torch.float16)
    assert torch.allclose(rms_norm(x, torch.ones(64, dtype=torch.float16)).float(), torch.ones(2, 64))


def test_module_is_what_the_config_names() -> None:
    x = torch.randn(5, 12)
    rms, layer = Norm(config(), 12, eps=1e-3), Norm(config(normalization="LayerNorm"), 12, eps=1e-3)
    torch.testing.assert_close(rms(x), F.rms_norm(x, (12,), torch.ones(12), 1e-3))
    assert torch.equal(layer(x), F.layer_norm(x, (12,), torch.ones(12), torch.zeros(12), 1e-3))
    assert [n for n, _ in rms.named_parameters()] == ["weight"]
    assert [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    centred = Norm(config(layernorm_zero_centered_gamma=True), 12, eps=1e-3)
    assert (centred.weight == 0).all() and torch.equal(centred(x), rms(x))
    centred = Norm(config(normalization="LayerNorm", layernorm_zero_centered_gamma=True), 12, eps=1e-3)
    assert (centred.weight == 0).all() and torch.equal(centred(x), layer(x))


def test_parameters_say_whether_their_gradients_are_partial() -> None:
    for parallel in (False, True):
        module = Norm(config(normalization="LayerNorm", sequence_parallel=parallel), 4)
        assert all(p.sequence_parallel is parallel for p in module.parameters())  # type: ignore[attr-defined]


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ValueError, match=r"normalization='L2Norm'.*RMSNorm"):
        Norm(config(normalization="L2Norm"), 4)

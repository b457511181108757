"""Megatron-Core's stand-ins for apex's kernels on a GPU: the same numbers, and nothing is read back for each tensor."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_fp8 import mcore
from megatron_fp8.mcore import environment as compat
from megatron_fp8.mcore.patches import cpu_engine, missing_packages

NOTHING = torch.zeros(1, dtype=torch.int32)


@pytest.fixture(autouse=True)
def nothing_installed() -> None:
    """Another file's `install()` in this process would make a CPU of "cuda"."""
    mcore.uninstall()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)


def test_the_norm_is_that_of_one_vector_and_is_not_read_back():
    grads = [torch.randn(n, dtype=dtype) for n, dtype in ((7, torch.float32), (300, torch.bfloat16))]
    found, _ = missing_packages.norm_without_waiting(2**16, NOTHING, [grads], False)
    whole = torch.cat([grad.double() for grad in grads]).norm()
    assert found.shape == (1,) and found.dtype == torch.float32
    assert found.item() == pytest.approx(whole.item(), rel=1e-6)
    grads[0][3] = torch.inf
    assert missing_packages.norm_without_waiting(2**16, NOTHING, [grads], False)[0].isinf()
    with FakeTensorMode():  # whoever reads a number of a fake tensor gets an error
        fake = [torch.empty(4, device="cuda"), torch.empty(2, device="cuda")]
        flag = torch.empty(1, device="cuda")
        assert missing_packages.norm_without_waiting(2**16, flag, [fake], False)[0].device.type == "cuda"


def test_scaling_has_the_bits_of_the_stand_in():
    scale = functools.partial(missing_packages.scale_at_once, utils.local_multi_tensor_scale)
    grads = [torch.randn(5), torch.randn(3, 2)]
    expected = [grad * 0.3 for grad in grads]
    with mock.patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as at_once:
        scale(2**16, NOTHING, [grads, grads], 0.3)
    assert at_once.call_count == 1
    elsewhere = [torch.zeros(5), torch.zeros(3, 2)]
    scale(2**16, NOTHING, [expected, elsewhere], 1.0)
    assert all(
        torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(grads, expected, elsewhere, strict=True)
    )


def test_only_stand_ins_are_replaced(stand_ins, monkeypatch):
    assert {patch.name for patch in missing_packages.on_gpu()} == {"l2_norm_impl", "multi_tensor_scale_impl"}
    monkeypatch.setattr(clip_grads, "l2_norm_impl", lambda *args: None)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", lambda *args: None)
    assert missing_packages.on_gpu() == []


@pytest.mark.parametrize("gpu", [True, False])
def test_one_engine_is_patched(gpu, monkeypatch):
    """On a GPU machine nothing of the CPU's engine is in force."""
    patched: list[str] = []
    monkeypatch.setattr(mcore, "_installed", None)
    monkeypatch.setattr(compat, "has_cuda", lambda: gpu)
    monkeypatch.setattr(cpu_engine, "patches", lambda: patched.append("cpu") or [])
    monkeypatch.setattr(missing_packages, "on_gpu", lambda: patched.append("gpu") or [])
    with mock.patch("megatron_fp8.mcore.patches.patching.PatchSet"):
        mcore.install()
    assert patched == ["gpu" if gpu else "cpu"]

"""The host waits for no value inside a step on a GPU: nothing is looked at, in any layer, of any recipe."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from megatron_fp8.backends.base import Region
from megatron_fp8.backends.native import backend as native
from megatron_fp8.linear.amax_recorder import observe
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.mcore.layers import activation, attention
from megatron_fp8.mcore.layers.norm import rms_norm
from megatron_fp8.numerics.cast import RandomKey
from megatron_fp8.params.fp8_parameter import Fp8Parameter, fp8_parameter
from megatron_fp8.params.shards import quantize_shards
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.quantizer import Quantizer
from megatron_fp8.recipe import CustomRecipe, DelayedScaling, MXFP8BlockScaling
from megatron_fp8.state.cuda_graph import CapturedStep
from megatron_fp8.state.fp8_state import Fp8State
from tests.support.sites import NATIVE_RECIPES as RECIPES
from tests.support.valueless_tensors import gpu_without_values, warm


def _without(plain: str) -> CustomRecipe:
    return CustomRecipe(lambda role: None if role == plain else RECIPES["rowwise"])


LINEAR = RECIPES | {f"no-{role}": _without(role) for role in ("input", "weight", "grad_output")}


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("fp8_wgrad", [True, False], ids=["", "wgrad in BF16"])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name: str, fp8_wgrad: bool, main_grad: bool) -> None:
    """Forward, backward and the update; beside a role in high precision the other operand is decoded."""
    with gpu_without_values():
        state = Fp8State()
        site = GemmSite(fp8_site("a", 0, LINEAR[name], "native", "test", fp8_wgrad=fp8_wgrad), state, None)
        warm(state)
        x, w, bias = leaf(128, 256), leaf(384, 256), leaf(384)
        if main_grad:
            w.main_grad, w.grad_added_to_main_grad = torch.empty(384, 256), False  # type: ignore[attr-defined]
        # Else what watches operations is shown one operator, which is not looked into.
        with CapturedStep(state):
            fp8_linear(x, w, bias, site).sum().backward()
        assert x.grad is not None and w.grad is not None


def test_rounding_at_random() -> None:
    """It has no kernel."""
    rule = MXFP8BlockScaling(stochastic_rounding=True).rule("grad_output")
    with gpu_without_values():
        native.quantize(torch.empty(64, 96), rule, "both", region=Region(RandomKey(1)))


def test_linear_that_is_observed() -> None:
    """A warm-up in high precision, which fills delayed scaling's histories."""
    with gpu_without_values():
        site = GemmSite(fp8_site("a", 0, DelayedScaling(), "native", "test"), Fp8State(), None)
        x, w = leaf(64, 32), leaf(48, 32)
        y = x @ w.t()
        observe(site, x, w, y, training=True)
        y.sum().backward()


@pytest.mark.parametrize("between", [False, True], ids=["written", "between FP8 linears"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_swiglu_that_stores_its_input(weighted: bool, between: bool) -> None:
    linear = SimpleNamespace(makes_codes_of=lambda role: True)
    token = activation._mlp.set(SimpleNamespace(linear_fc1=linear, linear_fc2=linear) if between else None)
    try:
        with gpu_without_values():
            x, weights = leaf(256, 512), leaf(256, 1, dtype=torch.float32)
            if weighted:
                y = activation.store_expert_swiglu_input_in_fp8(_never, x, None, weights, True)
            else:
                y = activation.store_swiglu_input_in_fp8(_never, x, None, True)
            (y * 1).sum().backward()
            assert x.grad is not None and (weights.grad is not None) == weighted
    finally:
        activation._mlp.reset(token)


def _never(*_: Any) -> torch.Tensor:
    raise AssertionError("Megatron-Core's own was called")


@pytest.mark.parametrize("deferred", [False, True])
def test_norm(deferred: bool) -> None:
    with gpu_without_values():
        x, weight = leaf(64, 256), leaf(256)
        (rms_norm(x, weight, deferred=deferred) * 1).sum().backward()
        assert x.grad is not None and weight.grad is not None


@pytest.mark.parametrize("name", [name for name in RECIPES if "fp32" not in name])
def test_casts_of_parameters(name: str) -> None:
    """A master written whole, and in pieces; per row and per 32 by torch operations, the others by kernels."""
    with gpu_without_values():
        parameters = []
        for _ in range(2):
            state = Fp8State()
            rule = RECIPES[name].rule("weight")
            assert rule is not None
            delayed = RECIPES[name] if isinstance(RECIPES[name], DelayedScaling) else None
            slot = state.arena(None).add(delayed, rule.fmt)  # type: ignore[arg-type]
            parameter = fp8_parameter(
                torch.empty(256, 384, dtype=torch.bfloat16), Quantizer(rule, slot, native)
            )
            assert isinstance(parameter, Fp8Parameter)
            parameter.write(torch.empty(256, 384))
            parameter.record()
            parameter.dequantize()
            parameters.append(parameter)
        quantize_shards(parameters, [torch.empty(5000), None], [300, None], None)


def test_packed_sequences_are_read_once_a_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first layer; again for other numbers."""
    from megatron.core.packed_seq_params import PackedSeqParams

    reads: list[int] = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(1), read(t))[1])
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends.clone())
    q = torch.randn(8, 2, 16)
    first = [attention._packed(q, q, q, packed, 0.25, True) for _ in range(3)]
    assert len(reads) == 2 and torch.equal(first[0], first[2])
    ends[1] = 5
    packed.cu_seqlens_kv.copy_(ends)
    other = attention._packed(q, q, q, packed, 0.25, True)
    assert len(reads) == 4 and not torch.equal(first[0], other)


def test_a_look_would_be_seen() -> None:
    """What makes the tests above see something."""
    with gpu_without_values(), pytest.raises(DataDependentOutputException):
        bool(torch.empty(3).max() > 1)

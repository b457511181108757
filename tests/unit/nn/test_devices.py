"""Inputs, weights and biases on several devices: refused where torch's linear refuses them, before anything is cast."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.nn import convert_to_fp8, fp8_matmul
from tests.support.experts import hidden, layer, routing

PLACES = list(itertools.product(("cpu", "meta"), repeat=3))


def on(model: nn.Module, weight: str, bias: str) -> Any:
    layer = model[0]
    layer.weight = nn.Parameter(layer.weight.detach().to(weight))
    layer.bias = nn.Parameter(layer.bias.detach().to(bias))
    return model


def refused(model: nn.Module, device: str) -> bool:
    try:
        y = model(torch.randn(4, 64).to(device))
    except (RuntimeError, ValueError):
        return True
    assert y.device.type == device
    return False


@pytest.mark.parametrize(
    ("recipe", "training", "grad", "kind"),
    [
        ("delayed", True, True, nn.Linear),
        ("mxfp8", False, False, nn.Linear),
        ("tensorwise", True, False, Conv1D),
        ("rowwise", False, True, Conv1D),
    ],
)
def test_what_torch_refuses_is_refused(recipe: str, training: bool, grad: bool, kind: Any) -> None:
    for x, weight, bias in PLACES:
        plain = nn.Sequential(kind(64, 64)).train(training)
        model = convert_to_fp8(nn.Sequential(kind(64, 64)), recipe, skip=[]).train(training)
        mixed = len({x, weight, bias}) > 1
        with torch.set_grad_enabled(grad):
            assert refused(on(model, weight, bias), x) == mixed, (x, weight, bias)
            assert mixed or not refused(on(plain, weight, bias), x)
            if x == weight != bias or x != weight == bias:  # it overlooks a weight that alone is elsewhere
                assert refused(on(plain, weight, bias), x)
        if mixed:
            assert all(state.counts.casts == 0 for state in model[0].fp8_group.states.values())


def test_what_is_said() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(64, 64)).to("meta"), skip=[])
    with pytest.raises(
        ValueError, match=r"^0: the input is on cpu, the weight on meta and its bias on meta: .*to_empty"
    ):
        model(torch.randn(4, 64))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "mxfp8"])
def test_prepared_weights(recipe: str) -> None:
    """Also of a token, which goes to C at once."""
    model = prepare_for_inference(convert_to_fp8(nn.Sequential(nn.Linear(64, 64)), recipe, skip=[]))
    biased = prepare_for_inference(convert_to_fp8(nn.Sequential(nn.Linear(64, 64)), recipe, skip=[]))
    biased[0].bias = nn.Parameter(biased[0].bias.to("meta"))
    for rows in (1, 64):
        with torch.no_grad(), pytest.raises(ValueError, match="the input is on meta, the weight on cpu"):
            model(torch.randn(rows, 64, device="meta"))
        with torch.no_grad(), pytest.raises(ValueError, match="the weight on cpu and its bias on meta"):
            biased(torch.randn(rows, 64))


@pytest.mark.parametrize(("recipe", "kind"), [("delayed", "mixtral"), ("mxfp8", "llama4")])
def test_experts(recipe: str, kind: str) -> None:
    experts = convert_to_fp8(layer(kind).experts, recipe)
    arguments = (hidden(36),) if kind == "llama4" else (hidden(), *routing())
    experts.to("meta")
    with pytest.raises(ValueError, match=r"0\.gate_up: the input is on cpu, the weight on meta"):
        experts(*arguments)
    y = experts(*(x.to("meta") for x in arguments))
    assert y.is_meta


def test_one_stack_elsewhere() -> None:
    experts = convert_to_fp8(layer("mixtral").experts, "tensorwise")
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to("meta"))
    with pytest.raises(ValueError, match=r"0\.down: the input is on cpu, the weight on meta"):
        experts(hidden(), *routing())


def test_matmul() -> None:
    a, b = torch.randn(4, 64), torch.randn(64, 32)
    for one, other in ((a, b.to("meta")), (a.to("meta"), b)):
        with pytest.raises(ValueError, match="same dtype and device"):
            fp8_matmul(one, other)

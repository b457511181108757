"""Stacked experts made ready for inference: codes for each expert, the stack freed, files and copies as before."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

from benchmarks.support.compare import assert_all_same_bytes, assert_same_bytes
from megatron_fp8.inference import model_bytes, prepare_for_inference
from megatron_fp8.inference.calibration import calibrate
from megatron_fp8.nn import Fp8Config, convert_from_fp8, convert_to_fp8, fp8_step
from tests.support.experts import EXPERTS, HIDDEN, WIDTH, hidden, layer, routing

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")


def trained(kind: str = "mixtral", recipe: Any = "tensorwise", **fields: Any) -> Any:
    model = convert_to_fp8(layer(kind), config=Fp8Config(recipe=recipe, **fields))
    model(hidden(), *routing()).float().square().sum().backward()
    fp8_step(model)
    model.zero_grad()
    return model


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_the_training_forwards_bytes_in_half_of_the_memory(kind: str, recipe: str) -> None:
    model = trained(kind, recipe)
    wanted, keys = model(hidden(), *routing()).detach(), list(model.state_dict())
    stack, before = weakref.ref(model.experts.gate_up_proj), model_bytes(model.experts)
    prepare_for_inference(model, pad_tokens=32)
    gc.collect()
    assert stack() is None, "somebody keeps the weights in high precision"
    values = EXPERTS * HIDDEN * 3 * WIDTH
    assert before - model_bytes(model.experts) > 0.9 * values
    assert (
        sum(site.bytes_before for site in model.fp8_inference.sites if "experts" in site.name) == 2 * values
    )
    with torch.inference_mode():
        assert_same_bytes(model(hidden(), *routing()), wanted)
        assert_same_bytes(copy.deepcopy(model)(hidden(), *routing()), wanted)
    assert sorted(model.state_dict()) == sorted(keys)


def test_compiled_they_run_outside_the_graph() -> None:
    model = trained()
    prepare_for_inference(model)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")(hidden(), *routing())
        assert_same_bytes(compiled, model(hidden(), *routing()))
    torch._dynamo.reset()


def test_files_have_stacks_and_are_read_again() -> None:
    model, other = trained("gpt_oss", "rowwise"), trained("gpt_oss", "rowwise")
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare_for_inference(model)
    for name, tensor in model.state_dict().items():
        assert tensor.shape == plain[name].shape, name
        assert (tensor - plain[name]).norm() < 0.05 * plain[name].norm(), name
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    prepare_for_inference(other)
    other.load_state_dict(plain)
    assert_same_bytes(other(hidden(), *routing()), model(hidden(), *routing()))
    convert_from_fp8(other)
    assert_all_same_bytes(model.state_dict(), other.state_dict())


def test_experts_that_stay_in_high_precision_keep_their_weights() -> None:
    model = trained(overrides={"experts.1.*": "bf16", "experts.down_proj": "bf16"})
    wanted = model(hidden(), *routing()).detach()
    prepare_for_inference(model)
    assert sorted(model.fp8_inference.high_precision) == [
        "experts.0.down", "experts.1.down", "experts.1.gate_up", "experts.2.down", "experts.3.down",
    ]  # fmt: skip
    assert_same_bytes(model(hidden(), *routing()), wanted)
    assert "down_proj" in dict(model.experts.named_parameters()), "no expert of it is in FP8"


def test_static_scales() -> None:
    """Each expert's input is watched by itself; one without tokens has no scale to be static."""
    model = trained(recipe="tensorwise")
    calibration = calibrate(model, [(hidden(), *routing())])
    amaxes = {calibration.ranges[f"experts.{e}.gate_up.input"].amax for e in range(EXPERTS)}
    assert len(amaxes) > 1
    idle = calibrate(model, [(hidden(), *routing(without=2))])
    with pytest.raises(ValueError, match=r"nothing but zeros go into experts\.2"):
        prepare_for_inference(copy.deepcopy(model), calibration=idle)
    dynamic = model(hidden(), *routing()).detach()
    prepare_for_inference(model, calibration=calibration)
    site = model.fp8_inference.sites[-1]
    assert site.activations == "static, one scale per tensor"
    y = model(hidden(), *routing())
    assert 0 < (y - dynamic).norm() < 0.1 * dynamic.norm(), (
        "calibration saw other inputs of the down projections"
    )
    assert_same_bytes(copy.deepcopy(model)(hidden(), *routing()), y)

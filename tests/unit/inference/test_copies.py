"""What a copy of an FP8 model keeps: static scales, codes, histories; by deepcopy, by a file, as a moving average."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8 import convert_to_fp8, fp8_step
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.inference.calibration import calibrate

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))


def made(recipe: str) -> torch.nn.Module:
    torch.manual_seed(0)
    tower = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32))
    return convert_to_fp8(tower, recipe)


def through_a_file(value, *, weights_only: bool):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_static_scales_go_with_copies(recipe):
    model = made(recipe)
    calibration = calibrate(model, [0.3 * X])
    dynamic = copy.deepcopy(model).eval()(X)
    prepare_for_inference(model, calibration=calibration)
    expected = model(X)
    assert not torch.equal(expected, dynamic), "the static scales change nothing"
    for kept in (copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))):
        assert_same_bytes(kept(X), expected, "a deep copy")
        assert kept.fp8_inference == model.fp8_inference and not kept.training
    pickled = through_a_file(model, weights_only=False)
    assert (pickled(X) - expected).abs().max() < 1e-3 * (dynamic - expected).abs().max()
    other = made(recipe)
    other.load_state_dict(through_a_file(model.state_dict(), weights_only=True))
    assert_same_bytes(prepare_for_inference(other, calibration=calibration)(X), expected, "a state dict")


def test_histories_go_with_deep_copies():
    """As they are at that moment, and each goes its own way then."""
    model = made("delayed")
    for factor in (1.0, 30.0):
        model(X * factor).sum().backward()
        fp8_step(model)
    expected = model.eval()(X)
    assert not torch.equal(expected, made("delayed").eval()(X)), "a cold model computes the same"
    kept = copy.deepcopy(model)
    model.train()
    model(X * 1000).sum().backward()
    fp8_step(model)
    assert_same_bytes(kept(X), expected, "the copy")
    assert_same_bytes(prepare_for_inference(copy.deepcopy(kept))(X), expected, "a copy that is prepared")

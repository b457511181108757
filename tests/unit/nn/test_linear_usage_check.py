"""What the first iterations find: linears that nobody calls, and linears that others took the place of."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from megatron_fp8.nn import Fp8Linear, convert_to_fp8, fp8_autocast, fp8_step


class Reader(nn.Module):
    """As WavLM's attention does it: its code multiplies by a linear's weight and never calls it."""

    def __init__(self):
        super().__init__()
        self.called, self.read, self.idle = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.called(x), self.read.weight)


def steps(model: nn.Module, count: int) -> list[str]:
    """Train without an optimizer; what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            model(torch.ones(16, 32)).sum().backward()
            fp8_step(model)
    return [str(w.message) for w in caught]


def test_linears_that_nobody_calls_are_named_once_and_marked():
    model = convert_to_fp8(Reader())
    assert model.fp8_report.not_in_use == {} and "3 of 3 modules" in str(model.fp8_report)
    assert steps(model, 2) == []
    (said,) = steps(model, 4)
    assert said.startswith("2 of 3 FP8 linears did not run in the first 3 iterations (read, idle)")
    reason = "converted, but did not run in the first 3 iterations"
    assert model.fp8_report.not_in_use == {"read": reason, "idle": reason}
    assert "1 of 3 modules with parameters run in FP8: 33 % of the weights" in str(model.fp8_report)
    assert "not in FP8" in str(model.fp8_report)


def test_who_runs_later_loses_the_mark():
    """An expert that got its first token in the fifth iteration."""
    model = convert_to_fp8(Reader())
    fresh = model.fp8_report
    assert len(steps(model, 4)) == 1 and set(model.fp8_report.not_in_use) == {"read", "idle"}
    model.forward = lambda x: model.idle(model.called(x))
    assert steps(model, 1) == [] and set(model.fp8_report.not_in_use) == {"read"}
    model.forward = lambda x: model.read(model.called(x))
    assert steps(model, 2) == [] and model.fp8_report == fresh


def test_an_iteration_without_fp8_tells_nothing():
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32)))
    with fp8_autocast(enabled=False):
        assert steps(model, 4) == []
    with fp8_autocast(recipe="mxfp8"):
        assert steps(model, 4) == []  # ran in FP8, by another recipe
    assert model.fp8_report.not_in_use == {}


def test_compiled_linears_have_run():
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(16, 32)).sum().backward()
    assert all(linear.fp8_sites.has_run for linear in model)


def test_a_linear_in_the_place_of_an_fp8_one_is_said_once():
    """transformers' resize_token_embeddings makes a new nn.Linear for the head."""
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    assert steps(model, 1) == []
    model[1] = nn.Linear(32, 64)
    (said,) = steps(model, 3)
    assert said == (
        "converted linears were replaced by linears without FP8: 1 (1); call convert_to_fp8(model) again to run them"
        " in FP8"
    )
    assert list(model.fp8_report.not_in_use) == ["1"]
    convert_to_fp8(model)
    assert isinstance(model[1], Fp8Linear) and model.fp8_report.not_in_use == {}
    assert steps(model, 4) == []


@pytest.mark.parametrize("cut", [True, False])
def test_linears_that_are_gone_or_wrapped_are_nothing_to_say(cut):
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    if cut:
        del model[1]
    else:
        model[1] = nn.Sequential(model[1])
    assert steps(model, 4) == []

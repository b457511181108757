"""The first iteration at which a tensor went bad, and why; once for each reason, resumed or not."""

import math

import torch

from megatron_fp8 import convert_to_fp8
from megatron_fp8.nn import fp8_step
from megatron_fp8.telemetry import Telemetry
from megatron_fp8.telemetry.health import FirstBad, limit_line
from tests.support.sites import randn


def record(iteration, **figures):
    return {"iteration": iteration, "site": "fc1", "tensor": "input", **figures}


def test_each_reason_once():
    known = FirstBad()
    assert known.check([record(1, nonfinite=0.0, **{"overflows%": 0.5, "underflows%": 40.0})]) == []
    (bad,) = known.check([record(2, nonfinite=3.0, **{"overflows%": 2.0})])
    assert bad["went_bad"] == ["non-finite", "saturation"]
    assert limit_line([bad, bad]) == (
        "telemetry: iteration 2: fc1 input went bad: non-finite (3 values), and 1 more tensors"
    )
    assert known.check([record(3, nonfinite=3.0, **{"overflows%": 2.0})]) == []
    (later,) = known.check([record(4, **{"underflows%": 60.0})])
    assert later["went_bad"] == ["underflow"] and "underflow (60%)" in limit_line([later])
    assert known.found == {
        ("fc1", "input", "non-finite"): 2,
        ("fc1", "input", "saturation"): 2,
        ("fc1", "input", "underflow"): 4,
    }
    again = FirstBad([bad, later])
    assert again.found == known.found and again.check([record(9, nonfinite=1.0)]) == []


def test_nan_is_named_where_it_begins():
    """In a weight; else in the first layer's forward; else in the last layer's gradient."""
    every = [
        {"iteration": 2, "site": site, "tensor": tensor, "nonfinite": 3.0, "went_bad": ["non-finite"]}
        for site in ("fc1", "fc2")
        for tensor in ("input", "weight", "grad_output", "output", "dgrad")
    ]
    named = {
        without: limit_line([one for one in every if one["tensor"] not in without]).split()[3:5]
        for without in ((), ("weight",), ("weight", "input", "output"))
    }
    assert list(named.values()) == [["fc1", "weight"], ["fc1", "input"], ["fc2", "grad_output"]]


def test_a_planted_inf_is_told_where_it_first_was(tmp_path):
    def model():
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)).bfloat16()
        return convert_to_fp8(layers, skip=[])

    said = []
    first = model()
    with Telemetry(first, folder=tmp_path, say=said.append) as telemetry:
        for iteration in (1, 2, 3):
            x = randn(64, 32, seed=iteration)
            x[0, 0] = math.inf if iteration == 2 else 0
            first(x).sum().backward()
            fp8_step(first)
    assert telemetry.first_bad["0", "input", "non-finite"] == 2
    assert said[0].startswith("telemetry: iteration 2: 0 input went bad: non-finite (1 values)")
    with Telemetry(model(), folder=tmp_path, finished=2) as resumed:
        assert resumed.first_bad == {k: v for k, v in telemetry.first_bad.items() if v <= 2}

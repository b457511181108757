"""torch.compile over a converted model: one graph, the bits of eager mode, and no graph more where something changes.

Compiled by 'aot_eager', which traces and differentiates as Inductor does and rounds as eager mode does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.nn import convert_to_fp8, fp8_autocast, fp8_state_dict, fp8_step
from megatron_fp8.recipe import DelayedScaling

DELAYED = DelayedScaling(amax_history_len=2)
Region = Callable[[int], AbstractContextManager[Any]]


pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def plain(net: Net) -> Callable:
    return net


def checkpointed(net: Net) -> Callable:
    return lambda x: checkpoint(net, x, use_reentrant=False) + x


def partly_off(net: Net) -> Callable:
    def call(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(net.up(x))
        with fp8_autocast(enabled=False):
            return net.down(hidden)

    return call


def autocast(net: Net) -> Callable:
    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    return call


def everywhere(_: int) -> AbstractContextManager[Any]:
    return nullcontext()


def switched(step: int) -> AbstractContextManager[Any]:
    return [
        nullcontext(),
        fp8_autocast(enabled=False),
        fp8_autocast(recipe="mxfp8"),
        fp8_autocast(recipe=DELAYED),
    ][step]


@pytest.mark.parametrize(
    ("form", "recipe", "region", "graphs"),
    [
        pytest.param(plain, "tensorwise", everywhere, 1, marks=pytest.mark.long),
        (plain, DELAYED, everywhere, 1),
        (plain, "rowwise", switched, 4),
        (checkpointed, "mxfp8", everywhere, 1),
        (partly_off, "blockwise", everywhere, 1),
        (autocast, DELAYED, everywhere, 1),
    ],
    ids=["tensorwise", "delayed", "switched", "checkpointed", "partly off", "autocast"],
)
def test_four_iterations_with_the_bits_of_eager_mode(form, recipe, region: Region, graphs):
    eager, traced = convert_to_fp8(Net(), recipe), convert_to_fp8(Net(), recipe)
    counter = CompileCounterWithBackend("aot_eager")
    calls = form(eager), torch.compile(form(traced), fullgraph=True, backend=counter)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, traced)]
    for step in range(4):
        results = []
        for call, model, optimizer in zip(calls, (eager, traced), optimizers, strict=True):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
            with region(step):
                y = call(x)
            y.float().square().mean().backward()
            counts = fp8_step(model)
            results.append(
                {"y": y, "dx": x.grad, "gemms": torch.tensor(counts.fp8_gemms), **fp8_state_dict(model)}
            )
            results[-1] |= {f"d{name}": p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        assert results[0].keys() == results[1].keys()
        for name, expected in results[0].items():
            assert_same_bytes(results[1][name], expected, f"step {step}: {name}")
    assert counter.frame_count == graphs


def test_training_and_evaluation_are_two_graphs_and_evaluation_records_nothing():
    model = convert_to_fp8(Net(), DELAYED)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for _ in range(2):
        compiled(torch.ones(8, 32)).sum().backward()
        fp8_step(compiled)
        before = fp8_state_dict(model)
        compiled.eval()
        with torch.no_grad():
            compiled(torch.full((8, 32), 9.0))
        compiled.train()
        assert fp8_step(compiled).fp8_gemms == 0
        after = fp8_state_dict(model)
        for name in before:
            if not name.endswith(".iteration"):
                assert_same_bytes(after[name], before[name], name)
    assert counter.frame_count == 2


def test_a_missing_fp8_step_is_an_error_in_compiled_code_too():
    model = convert_to_fp8(Net(), DELAYED)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(torch.ones(8, 32)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="fp8_step was not called"):
        compiled(torch.ones(8, 32))


def test_layers_of_one_shape_share_a_graph():
    """Blocks compiled one by one: what the first one compiles serves all others."""
    model = convert_to_fp8(nn.Sequential(*[Net() for _ in range(3)]), DELAYED)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(fullgraph=True, backend=counter)
    for _ in range(2):
        model(torch.ones(8, 32, requires_grad=True)).sum().backward()
        assert fp8_step(model).fp8_gemms == 6 * 3
    assert counter.frame_count == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_graph_may_break_in_the_first_call_of_all(training: bool):
    """Dynamo traces the function again up to the break, and finds sites that the first trace has made."""

    class Broken(Net):
        def forward(self, x):
            found = super().forward(x)
            print(end="")
            return super().forward(found)

    torch.manual_seed(0)
    model = convert_to_fp8(Broken(), DELAYED).train(training)
    eager = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(model, backend=counter)
    for _ in range(2):
        x = torch.randn(8, 32)
        assert_same_bytes(traced(x), eager(x))
    assert counter.frame_count >= 2

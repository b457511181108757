"""Benchmarks of other installed libraries on the same shapes: torchao's linear.

A missing library is reported with the reason. On a CPU torchao emulates FP8, as this package does. `make
gpu-bench` measures Transformer Engine, on a GPU.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
from torch import Tensor, nn

from ...plan.size_table import Gemm
from .gemm_bench import LINEAR_BOUND, Bench


def missing() -> str | None:
    """Why torchao cannot be measured; None if it can."""
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def linear(bench: Bench, shape: Gemm) -> None:
    """Times torchao's tensorwise linear, forward and backward; compiled on a GPU."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    weight = bench.matrix(shape.n, shape.k, seed=2).mul_(shape.k**-0.5)
    x, dy = bench.matrix(shape.tokens, shape.k, seed=1), bench.matrix(shape.tokens, shape.n, seed=3)
    holder = nn.Sequential(nn.Linear(shape.k, shape.n, bias=False, device="meta"))
    holder[0].weight = nn.Parameter(weight)
    plain = nn.Linear(shape.k, shape.n, bias=False, device="meta")
    plain.weight = nn.Parameter(weight.clone())
    convert_to_float8_training(holder, config=Float8LinearConfig(emulate=bench.device.type == "cpu"))
    peer: nn.Module = torch.compile(holder) if bench.device.type == "cuda" else holder  # type: ignore[assignment]

    def run(model: nn.Module) -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        y = model(leaf)
        return y.detach(), *torch.autograd.grad(y, (leaf, *model.parameters()), dy)

    if bench.gate(f"linear {shape} torchao tensorwise", run(peer), run(plain), LINEAR_BOUND):
        bench.time("linear", shape, "torchao tensorwise", partial(run, peer), partial(run, plain))

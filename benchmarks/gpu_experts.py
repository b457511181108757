"""Experts' linears on a GPU, as a section of its benchmark: grouped, one after the other, and by torch and torchao.

The first linear of a layer's experts (gate and up), forward and backward; weights are quantized anew in each step. The
experts' numbers of tokens are unlike, and multiples of 128, which is what the peers' products ask for. torch and torchao
keep all weights in one tensor [experts, N, K]; here each expert has its own, as Megatron-Core has it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import gpu_contenders as contenders
from benchmarks.gpu_common import Machine, relative_error
from benchmarks.gpu_kernels import Bench, random, teraflops
from megatron_fp8.linear.function import fp8_linear, grouped_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.state.fp8_state import Fp8State

CASES = {
    "DeepSeek-V3, 32 of 256": (32, 7168, 4096, 512),
    "Qwen3-30B-A3B, 16 of 128": (16, 2048, 1536, 1024),
}
"""Name -> experts of one rank, K, N, and their tokens on average."""
DRY = {"4 experts": (4, 128, 96, 128)}
GRAIN = 128
BASELINES = ("bf16, grouped", "bf16, in turn")

Multiply = Callable[[torch.Tensor], torch.Tensor]


def experts(bench: Bench) -> None:
    """The section: every contender that is here and right."""
    for case, sizes in (DRY if bench.machine.dry else CASES).items():
        count, k, n, average = sizes
        tokens = tokens_of(count, average)
        runs = _runs(bench, case, tokens, k, n)
        rate = partial(teraflops, 6 * sum(tokens) * n * k)
        bench.time("experts", case, runs, rate=rate, baseline=BASELINES)
        bench.machine.empty()


def tokens_of(experts: int, average: int) -> list[int]:
    """Of each expert: from none to twice the average, evenly."""
    steps = 2 * average // GRAIN
    return [GRAIN * (steps * e // (experts - 1)) for e in range(experts)]


def _runs(bench: Bench, case: str, tokens: list[int], k: int, n: int) -> dict[str, Callable[[], Any]]:
    machine = bench.machine
    x, dy = (random(machine, sum(tokens), width, seed=s) for width, s in ((k, 1), (n, 3)))
    stacked = nn.Parameter(random(machine, len(tokens) * n, k, seed=2).view(len(tokens), n, k) * 0.03)
    parts = [nn.Parameter(part.clone()) for part in stacked.detach()]
    reference: list[torch.Tensor] = []
    runs: dict[str, Callable[[], Any]] = {}

    def add(name: str, multiply: Multiply, weights: list[nn.Parameter], *, own: bool = False) -> None:
        """Take it if its first step is as BF16's; ``own``: what is not ends as wrong, even if it raises."""

        def step() -> list[torch.Tensor]:
            leaf = x.detach().requires_grad_()
            y = multiply(leaf)
            y.backward(dy)
            assert leaf.grad is not None
            found = [y.detach(), leaf.grad, *(weight.grad for weight in weights if weight.grad is not None)]
            for weight in weights:
                weight.grad = None
            return found

        try:
            y, dx, *dw = step()
        except Exception as error:
            if own:
                bench.wrong.append(f"experts {case} {name}: {error}")
            bench.skip("experts", case, name, f"{type(error).__name__}: {error}".partition("\n")[0][:160])
            return
        found = [y, dx, dw[0] if len(dw) == 1 else torch.stack(dw)]
        reference[:] = reference or found
        off = max(relative_error(a, b) for a, b in zip(found, reference, strict=True))
        if bench.gate(f"experts {case} {name}", off, 0.12):
            runs[name] = step

    add("bf16, in turn", partial(bf16_in_turn, weights=parts, tokens=tokens), parts, own=True)
    ends = torch.tensor(tokens, device=machine.device).cumsum(0).to(torch.int32)
    add(
        "bf16, grouped",
        lambda a: torch.nn.functional.grouped_mm(a, stacked.transpose(1, 2), offs=ends),
        [stacked],
    )
    for name, recipe in contenders.RECIPES.items():
        reason = machine.backend.supports(machine.device, recipe)
        if reason is not None:
            bench.skip("experts", case, name, reason)
            continue
        for label, linear in ((f"{name}, grouped", grouped_linear), (f"{name}, in turn", _in_turn)):
            add(label, _ours(machine, linear, recipe, parts, tokens), parts, own=True)
    _torchao(bench, case, add, stacked, ends)
    return runs


def _ours(
    machine: Machine, linear: Callable[..., Any], recipe: Any, weights: list[nn.Parameter], tokens: list[int]
) -> Multiply:
    state = Fp8State(machine.device)
    sites = [
        GemmSite(fp8_site(f"experts.{e}", None, recipe, machine.backend.name, "benchmark"), state, None)
        for e in range(len(tokens))
    ]

    def multiply(x: torch.Tensor) -> torch.Tensor:
        state.finish_iteration()  # of the step before
        y: torch.Tensor = linear(x, weights, tokens, sites)
        return y

    return multiply


def _in_turn(
    x: torch.Tensor, weights: list[nn.Parameter], tokens: list[int], sites: list[GemmSite]
) -> torch.Tensor:
    parts = zip(x.split(tokens), weights, sites, strict=True)
    return torch.cat([fp8_linear(part, weight, None, site) for part, weight, site in parts])


def bf16_in_turn(x: torch.Tensor, weights: Sequence[torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """[T, N] of tokens [T, K] and weights [N, K], each expert's by torch's own product."""
    return torch.cat([part @ weight.t() for part, weight in zip(x.split(tokens), weights, strict=True)])


def _torchao(
    bench: Bench, case: str, add: Callable[..., None], stacked: nn.Parameter, ends: torch.Tensor
) -> None:
    """Its differentiable grouped products, which quantize with one scale a row, and in MXFP8."""
    names = ("torchao rowwise, grouped", "torchao mxfp8, grouped")
    missing = "torchao is not installed" if importlib.util.find_spec("torchao") is None else None
    if bench.machine.dry:
        missing = missing or "dry run: needs a GPU"
    try:
        if missing is None:
            from torchao.prototype import moe_training
    except Exception as error:  # another version's API, or one that this torch does not load
        missing = f"torchao: {type(error).__name__}: {error}".partition("\n")[0][:160]
    if missing is not None:
        for name in names:
            bench.skip("experts", case, name, missing)
        return

    def rowwise(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = moe_training._to_fp8_rowwise_then_scaled_grouped_mm(
            x, stacked.transpose(1, 2), ends, pad_token_groups_for_grouped_mm=False
        )
        return y

    def mxfp8(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = moe_training._to_mxfp8_then_scaled_grouped_mm(x, stacked.transpose(1, 2), ends)
        return y

    for name, multiply in zip(names, (rowwise, mxfp8), strict=True):
        add(name, multiply, [stacked])

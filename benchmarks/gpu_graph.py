"""Checks of gpu_check.py with a compiler or a CUDA graph around linears (``--only captured``, ``--only compiled``)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_common import RECIPES, Machine, NotRun, no_synchronisation, relative_error
from benchmarks.gpu_kernels import random
from benchmarks.support.compare import assert_same_bytes
from megatron_fp8.linear.function import fp8_linear
from megatron_fp8.linear.gemm_site import GemmSite
from megatron_fp8.plan.site_plan import fp8_site
from megatron_fp8.state.cuda_graph import CapturedStep
from megatron_fp8.state.fp8_state import Fp8State

ITERATIONS = 6


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every check by name."""
    found: dict[str, Callable[[Machine], str]] = {}
    for what, check in (("captured step", captured_step), ("compiled", compiled)):
        for name in ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"):
            found[f"{what} {name}"] = partial(check, recipe=RECIPES[name])
    return found


class Mlp:
    """Two linears with GELU between them, and everything that a step reads and writes, at addresses that stay."""

    def __init__(self, machine: Machine, recipe: Any):
        reason = machine.backend.supports(machine.device, recipe)
        if reason is not None:
            raise NotRun(reason)
        self.machine, self.state = machine, Fp8State(machine.device)
        m, k, n = (64, 96, 160) if machine.dry else (1024, 1024, 2816)
        plans = [fp8_site(f"layers.{i}.linear", i, recipe, machine.backend.name, "check") for i in range(2)]
        self.sites = [GemmSite(plan, self.state, None) for plan in plans]
        weights = [random(machine, n, k, seed=1) * 0.05, random(machine, k, n, seed=2) * 0.05]
        self.weights = [torch.nn.Parameter(w) for w in weights]
        for weight in self.weights:
            weight.main_grad = torch.zeros(weight.shape, device=machine.device)  # type: ignore[attr-defined]
            weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self.x, self.y, self.dx = (
            torch.zeros(m, k, dtype=torch.bfloat16, device=machine.device) for _ in "xyd"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, k] -> [tokens, k]."""
        hidden = F.gelu(fp8_linear(x, self.weights[0], None, self.sites[0]))
        return fp8_linear(hidden, self.weights[1], None, self.sites[1])

    def load(self, iteration: int) -> None:
        """New input, and weights as an optimizer leaves them."""
        self.x.copy_(random(self.machine, *self.x.shape, seed=10 + iteration) * (1 + iteration))
        for weight in self.weights:
            weight.data.mul_(1.03125)
            weight.main_grad.zero_()  # type: ignore[attr-defined]

    def step(self, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Forward and backward."""
        x = self.x.detach().requires_grad_()
        y = (forward or self.forward)(x)
        y.backward(y.detach())
        assert x.grad is not None
        self.y.copy_(y.detach())
        self.dx.copy_(x.grad)

    def results(self) -> dict[str, torch.Tensor]:
        """What an iteration left."""
        (arena,) = self.state.arenas
        found = {"y": self.y, "dx": self.dx, "scales": arena.scale, "amaxes": arena.last_amax}
        return found | {f"dw {i}": w.main_grad for i, w in enumerate(self.weights)}  # type: ignore[attr-defined]


def same(found: Mlp, expected: Mlp, when: str) -> None:
    """AssertionError naming the first element that differs."""
    for what, tensor in expected.results().items():
        assert_same_bytes(found.results()[what], tensor, f"{when}: {what}")


def captured_step(machine: Machine, recipe: Any) -> str:
    """Forward, backward and update in one CUDA graph: replays on new input and weights are eager iterations, to the bit.

    A dry run runs what would be captured.
    """
    eager, graphed = Mlp(machine, recipe), Mlp(machine, recipe)
    captured, graph = None, None
    for iteration in range(ITERATIONS):
        for mlp in (eager, graphed):
            mlp.load(iteration)
        eager.step()
        counts = eager.state.finish_iteration()
        if iteration < 2:
            side = nullcontext() if machine.dry else torch.cuda.stream(torch.cuda.Stream())
            with side:
                graphed.step()
                found = graphed.state.finish_iteration()
            machine.synchronize()
        else:
            if captured is None or machine.dry:
                captured = CapturedStep(graphed.state)
                if not machine.dry:
                    graph = torch.cuda.CUDAGraph()
                with nullcontext() if graph is None else torch.cuda.graph(graph), captured:
                    graphed.step()
            if graph is not None:
                with no_synchronisation(machine):
                    graph.replay()
            found = captured.replayed()
        assert found == counts, f"iteration {iteration}: {found}, expected {counts}"
        same(graphed, eager, f"iteration {iteration}")
    return f"{ITERATIONS - 2} replays, all bits of results, gradients, amaxes and scales"


def compiled(machine: Machine, recipe: Any) -> str:
    """torch.compile, no graph break: eager kernels give eager mode's bits; Inductor and its CUDA graphs follow."""
    modes = {"aot_eager": {"backend": "aot_eager"}}
    if not machine.dry:
        modes |= {"inductor": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    eager = Mlp(machine, recipe)
    others = {mode: Mlp(machine, recipe) for mode in modes}
    torch._dynamo.reset()
    runs = {
        mode: torch.compile(others[mode].forward, fullgraph=True, **options)  # type: ignore[call-overload]
        for mode, options in modes.items()
    }
    worst = 0.0
    for iteration in range(ITERATIONS):
        for mlp in (eager, *others.values()):
            mlp.load(iteration)
        eager.step()
        counts = eager.state.finish_iteration()
        for mode, mlp in others.items():
            if not machine.dry:
                torch.compiler.cudagraph_mark_step_begin()
            mlp.step(runs[mode])
            found = mlp.state.finish_iteration()
            assert found == counts, f"{mode}, iteration {iteration}: {found}, expected {counts}"
            if mode == "aot_eager":
                same(mlp, eager, f"{mode}, iteration {iteration}")
            else:
                errors = [
                    relative_error(mlp.results()[what], t)
                    for what, t in eager.results().items()
                    if what != "scales"
                ]
                worst = max(worst, *errors)
                assert worst < 2e-2, f"{mode}, iteration {iteration}: off by {worst:.1e} (RMS)"
    return "eager mode's bits" + ("" if machine.dry else f"; fused by Inductor {worst:.1e} from them (RMS)")

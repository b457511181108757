"""The sections of the GPU benchmark by name, and those that time linears, layers and steps.

Everything is compared with BF16 in the same process; contenders take turns, with a cold L2 and CUDA events. Before
anything is timed its result is compared with BF16's. Goals: a transformer layer of 8192 tokens, forward and backward,
>= 1.40 x BF16 at hidden 4096 and >= 1.55 at 8192; quantization at 80 % of a copy's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import gpu_contenders as contenders
from benchmarks import gpu_experts, gpu_fused, gpu_grouped, gpu_kernels
from benchmarks.common import Timing
from benchmarks.gpu_common import Clock, Machine, NotRun, relative_error
from benchmarks.gpu_kernels import Bench, random
from benchmarks.gpu_models import DENSE_182M, DRY, DRY_LAYER, LAYERS, Sizes, Training, make_weights

GOALS = {4096: 1.40, 8192: 1.55}


def checks() -> dict[str, Callable[[Machine], str]]:
    """Every section as a check: what it measures are rows, and it fails if a result was wrong."""
    sections: dict[str, Callable[[Bench], None]] = {
        "roofline": gpu_kernels.roofline,
        "gemm": gpu_kernels.gemm,
        "quantise": gpu_kernels.quantize,
        "fused": gpu_fused.fused,
        "linear": linear,
        "experts": gpu_experts.experts,
        "expert products": gpu_grouped.products,
        "step": step,
    }
    sections |= {f"layer {hidden}": partial(layer, hidden=hidden) for hidden in LAYERS}
    return {f"bench {name}": partial(measured, section=section) for name, section in sections.items()}


def measured(machine: Machine, section: Callable[[Bench], None]) -> str:
    """Run a section."""
    bench = Bench(machine, Clock(machine), 2 if machine.dry else machine.repetitions)
    section(bench)
    assert not bench.wrong, "wrong, and not timed: " + "; ".join(bench.wrong)
    timed = sum(row["median_s"] is not None for row in bench.rows)
    return f"{timed} timed, {len(bench.rows) - timed} not measured"


def linear(bench: Bench) -> None:
    """One linear, forward and backward, its weight quantized anew."""
    machine = bench.machine
    for m, n, k in [(64, 96, 128)] if machine.dry else [(8192, 28672, 4096), (8192, 8192, 8192)]:
        sizes = contenders.OneLinear(n, k)
        x, dy = random(machine, m, k, seed=1), random(machine, m, n, seed=3)
        runs = _runs(bench, "linear", f"{m} x {n} x {k}", sizes, x, dy)
        bench.time(
            "linear",
            f"{m} x {n} x {k}",
            runs,
            rate=partial(gpu_kernels.teraflops, 6 * m * n * k),
            baseline=("bf16", "bf16 compiled"),
        )
        machine.empty()


def layer(bench: Bench, hidden: int) -> None:
    """A Llama-like layer, forward and backward; fused projections, and for one recipe separate ones."""
    machine = bench.machine
    if machine.dry and hidden != min(LAYERS):
        raise NotRun("dry run: one small layer stands for all")
    sizes = DRY_LAYER if machine.dry else LAYERS[hidden]
    case = f"hidden {sizes.hidden}"
    x, dy = (random(machine, sizes.tokens, sizes.hidden, seed=s) for s in (1, 3))
    runs = _runs(bench, "layer", case, sizes, x, dy)
    times = bench.time("layer", case, runs, baseline=("bf16", "bf16 compiled"))
    _against_roofline(bench, sizes, times)
    del runs
    machine.empty()
    split = Sizes(sizes.hidden, sizes.ffn, sizes.tokens, sizes.sequence, fused=False)
    separate = contenders.ours(machine, split, make_weights(split, machine.device), only=("tensorwise",))
    separated = {f"{name}, separate qkv": run for name, run in _steps(separate, x, dy, {}).items()}
    bench.time("layer", case, separated, baseline=())


def _against_roofline(bench: Bench, sizes: Sizes, times: dict[str, Timing]) -> None:
    """What the run's own peaks allow: FP8 products at the bare scaled_mm's rate, operands quantized at a copy's."""
    peaks = bench.machine.peaks
    baseline = min(times[name].median for name in ("bf16", "bf16 compiled") if name in times)
    if not {"copy", "bf16", "bare scaled_mm"} <= set(peaks):
        return
    weights = sizes.weights().values()
    moved = 4 * sum(sizes.tokens * (n + k) + n * k for n, k in weights)
    rest = baseline - sizes.linear_flops / peaks["bf16"]
    allowed = rest + sizes.linear_flops / peaks["bare scaled_mm"] + moved / peaks["copy"]
    goal, more = GOALS.get(sizes.hidden), {}
    for row in bench.rows[-len(times) :]:
        rate = row["rate"]
        if row["contender"] in contenders.RECIPES:
            rate = f"{allowed / row['median_s']:.0%} of this run's roofline ({baseline / allowed:.2f} x)"
            if goal is not None:
                rate += f"; goal {goal:.2f} {'met' if row['speedup'] >= goal else 'MISSED'}"
        more[row["contender"]] = {"rate": rate}
    bench.tell_more(more)


def _runs(
    bench: Bench, section: str, case: str, sizes: Any, x: torch.Tensor, dy: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """Forward and backward of every contender that is here and right; the others' cells say why not."""
    weights = make_weights(sizes, bench.machine.device)
    modules, absent = contenders.everyone(bench.machine, sizes, weights)
    for name, why in absent.items():
        bench.skip(section, case, name, why)
    outputs: dict[str, tuple[torch.Tensor, ...]] = {}
    steps = _steps(modules, x, dy, outputs)
    good = {}
    for name, step in steps.items():
        try:
            step()
        except Exception as error:
            if name in contenders.RECIPES or name == "bf16":
                bench.wrong.append(f"{section} {case} {name}: {error}")
            bench.skip(section, case, name, f"{type(error).__name__}: {error}".partition("\n")[0][:160])
            continue
        state = getattr(modules[name], "fp8_state", None)
        if state is not None:
            state.finish_iteration()
        errors = [relative_error(a, b) for a, b in zip(outputs[name], outputs["bf16"], strict=True)]
        if bench.gate(f"{section} {case} {name}", max(errors), 0.12):
            good[name] = step
    outputs.clear()
    return {name: steps[name] for name in good}


def _steps(
    modules: dict[str, Any], x: torch.Tensor, dy: torch.Tensor, outputs: dict[str, tuple[torch.Tensor, ...]]
) -> dict[str, Callable[[], Any]]:
    """A forward and a backward of each module; what came out is kept the first time."""

    def make(name: str, module: Any) -> Callable[[], Any]:
        first = [True]

        def step() -> None:
            leaf = x.detach().requires_grad_()
            y = module(leaf)
            y.backward(dy)
            if first[0]:
                assert leaf.grad is not None
                outputs[name] = (y.detach().clone(), leaf.grad.clone())
                first[0] = False
            for parameter in module.parameters():
                parameter.grad = None

        return step

    return {name: make(name, module) for name, module in modules.items()}


def step(bench: Bench) -> None:
    """An optimizer step of the 182 M model on Megatron-Core: forward, backward, gradients, Adam."""
    machine = bench.machine
    sizes = DRY if machine.dry else DENSE_182M
    case = f"{sizes.batch} x {sizes.sequence} tokens"
    runs: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    for name in ("bf16", *contenders.RECIPES):
        if name == "mxfp8" and not machine.dry:
            reason = machine.backend.supports(machine.device, contenders.RECIPES[name])
            if reason is not None:
                bench.skip("step", case, name, reason)
                continue
        model = Training(sizes, None if name == "bf16" else name, machine.backend.name)
        first[name] = float(model.step())
        apart = abs(first[name] - first["bf16"]) / first["bf16"]
        if bench.gate(f"step {name}: first loss", apart, 0.01):
            runs[name] = model.step
    tokens = sizes.batch * sizes.sequence
    repetitions = 2 if machine.dry else 10
    bench.time(
        "step", case, runs, rate=lambda name, s: f"{tokens / s:,.0f} tokens/s", repetitions=repetitions
    )

"""The host's time of a linear layer, forward and backward, on the native backend: as a ratio to the same layer's in BF16.

On a GPU a step is as fast as the slower of two: the GPU, and the host that tells it what to do. Here the GPU is free
(support/free_gpu.py), so the host alone is measured, in CPU time: medians of rounds in which contenders alternate.

The base is nn.Linear without a bias in BF16 in the same process, whose products are as free as the FP8 layer's; of
Megatron-Core's column- and row-parallel linears (one rank) their own in BF16. Matrices are 128 x 128, the smallest that
no recipe pads. What is left of tensor operations besides products and Triton's kernels
computes on the CPU, a few microseconds each, and counts against the FP8 layer.

'first' quantises the weight too: Megatron-Core's in an iteration's first microbatch, which keeps the codes, and nn's
wherever it does not tell when weights are written, in each, which keeps none; 'later' has them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import command_line, environment, write_results
from benchmarks.support import free_gpu
from benchmarks.support.fp8_gpt import fp8_config
from benchmarks.support.ranks import Layout, model_parallel

NN = "nn.Linear"
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
SIZE = 128
BF16 = torch.bfloat16


def contenders() -> dict[str, Callable[[], None]]:
    """By name: a forward and backward of nn.Linear, and of each recipe with and without the weight's cast."""
    from megatron_fp8.nn import Fp8Config, Fp8Linear, fp8_step

    def linear(recipe: str) -> Any:
        config = Fp8Config(recipe=recipe, backend="native")
        return Fp8Linear(SIZE, SIZE, bias=False, dtype=BF16, config=config)

    plain = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=BF16)
    return with_recipes(NN, plain, linear, fp8_step, (SIZE, SIZE))


def megatron_contenders(stack: ExitStack) -> dict[str, Callable[[], None]]:
    """The same of Megatron-Core's column- and row-parallel linears, in a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    stack.enter_context(model_parallel())
    from megatron.core.tensor_parallel import layers as megatron

    from megatron_fp8.mcore.iteration import finish_iteration
    from megatron_fp8.mcore.layers import linear as layers

    found: dict[str, Callable[[], None]] = {}
    options: dict[str, Any] = {"init_method": torch.nn.init.zeros_, "bias": False, "skip_bias_add": False}
    for kind, specific in (("Column", {"gather_output": False}), ("Row", {"input_is_parallel": True})):
        name = f"{kind}ParallelLinear"

        def made(cls: Any, config: Any, specific: dict[str, Any] = specific) -> Any:
            return cls(SIZE, SIZE, config=config, **options, **specific)

        def linear(recipe: str, name: str = name, made: Any = made) -> Any:
            return made(getattr(layers, f"Fp8{name}"), fp8_config(Layout(), recipe, fp8_backend="native"))

        plain = made(getattr(megatron, name), fp8_config(Layout(), None))
        found |= with_recipes(name, plain, linear, lambda linear: finish_iteration([linear]), (SIZE, 1, SIZE))
    return found


def with_recipes(
    base: str,
    plain: torch.nn.Module,
    linear: Callable[[str], Any],
    finish: Callable[[Any], Any],
    shape: tuple[int, ...],
) -> dict[str, Callable[[], None]]:
    """A layer in BF16 (``base``) and in each recipe; its input and output have this shape. ``finish``: an iteration."""
    x = torch.randn(shape, dtype=BF16).requires_grad_()
    dy = torch.randn(shape, dtype=BF16)

    def training(layer: torch.nn.Module, before: Callable[[], None] | None = None) -> Callable[[], None]:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)

        def step() -> None:
            x.grad = weight.grad = None
            if before is not None:
                before()
            y = layer(x)
            (y[0] if isinstance(y, tuple) else y).backward(dy)

        return step

    found = {base: training(plain)}
    for recipe in RECIPES:
        first, later = linear(recipe), linear(recipe)
        for layer in first, later:
            warm(layer, x, dy, finish)
        later.fp8_site.state.keeps_weights = True
        before = None
        if base != NN:  # Megatron-Core's loops say when weights were written
            first.fp8_site.state.keeps_weights = True
            before = first.fp8_site.weights.forget
        found[f"{base}: {recipe}, first"] = training(first, before)
        found[f"{base}: {recipe}, later"] = training(later)
    return found


def warm(linear: Any, x: torch.Tensor, dy: torch.Tensor, finish: Callable[[Any], Any]) -> None:
    """Two iterations, so that delayed scales are there. Kernels write nothing: amaxes, and who has a scale, are said."""
    for _ in range(2):
        y = linear(x)
        (y[0] if isinstance(y, tuple) else y).backward(dy)
        for arena in linear.fp8_site.state.arenas:
            arena.rows[0].fill_(1.0)
        finish(linear)
    for arena in linear.fp8_site.state.arenas:
        for slot in arena.slots:
            slot.warm = slot.delayed is not None  # not what memory happens to hold


def measured(work: dict[str, Callable[[], None]], rounds: int, each: int) -> dict[str, list[float]]:
    """Microseconds of CPU time of a call, by contender, one figure a round."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for call in work.values():
        for _ in range(20):
            call()
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, call in work.items():
            start = time.process_time_ns()
            for _ in range(each):
                call()
            times[name].append((time.process_time_ns() - start) / each / 1000)
        gc.collect()
    gc.enable()
    return times


def launches(library: Any, call: Callable[[], None]) -> int:
    """Triton's launches of one call."""
    before = library.free_gpu_launches()
    call()
    return int(library.free_gpu_launches() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description="host time of a linear, forward and backward")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--each", type=int, default=30, help="calls a round")
    parser.add_argument("--only", default="", help="contenders whose name has this, besides those in BF16")
    parser.add_argument("--profile", action="store_true", help="print where Python spends it instead")
    parser.add_argument(
        "--write", action="store_true", help="write the result files under benchmarks/results"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = free_gpu.install()
    with ExitStack() as stack:
        work = contenders() | megatron_contenders(stack)
        work = {name: call for name, call in work.items() if args.only in name or ":" not in name}
        if args.profile:
            for name, call in work.items():
                if ":" in name:
                    _profile(name, call)
            return
        times = measured(work, args.rounds, args.each)
        counts = {name: launches(library, call) for name, call in work.items()}
    rows = [
        "| forward and backward | us | ratio | spread | Triton launches |",
        "| --- | --- | --- | --- | --- |",
    ]
    data: dict[str, Any] = {}
    for name, found in times.items():
        middle = statistics.median(found)
        low, *_, high = statistics.quantiles(found, n=10)
        base, count = statistics.median(times[name.split(":")[0]]), counts[name]
        data[name] = {"us": middle, "ratio": middle / base, "launches": count, "low": low, "high": high}
        rows.append(
            f"| {name} | {middle:.0f} | {middle / base:.2f} | {(high - low) / middle:.0%} | {count} |"
        )
    table = "\n".join(rows)
    print(table)
    if args.write:
        record = environment(["triton"]) | {"measured": "CPU time of one thread, medians"}
        write_results("host_time", "Host time of a linear", command_line(), record, table, data)


def _profile(name: str, call: Callable[[], None]) -> None:
    for _ in range(50):
        call()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(500):
        call()
    profile.disable()
    print(name)
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

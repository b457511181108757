"""The host's time of a linear layer, forward and backward, on the native backend: as a ratio to the same layer's in BF16.

On a GPU a step is as fast as the slower of two: the GPU, and the host that tells it what to do. Here the GPU is free
(support/no_op_gpu.py), so the host alone is measured, in CPU time: the least of rounds in which contenders alternate.

The base is nn.Linear without a bias in BF16 in the same process, whose products are as free as the FP8 layer's. Matrices
are 128 x 128, the smallest that no recipe pads. What is left of tensor operations besides products and Triton's kernels
computes on the CPU, a few microseconds each, and counts against the FP8 layer.

'first' quantizes the weight too, and keeps no codes of it; 'later' has them.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import command_line, environment, write_results
from benchmarks.support import no_op_gpu

NN = "nn.Linear"
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")
SIZE = 128
BF16 = torch.bfloat16


def contenders() -> dict[str, Callable[[], None]]:
    """By name: a forward and backward of nn.Linear, and of each recipe with and without the weight's cast."""
    from megatron_fp8.nn import Fp8Config, Fp8Linear

    x = torch.randn(SIZE, SIZE, dtype=BF16).requires_grad_()
    dy = torch.randn(SIZE, SIZE, dtype=BF16)

    def training(layer: torch.nn.Module) -> Callable[[], None]:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)

        def step() -> None:
            x.grad = weight.grad = None
            layer(x).backward(dy)

        return step

    found = {NN: training(torch.nn.Linear(SIZE, SIZE, bias=False, dtype=BF16))}
    for recipe in RECIPES:
        for keeps in (False, True):
            config = Fp8Config(recipe=recipe, backend="native")
            layer: Any = Fp8Linear(SIZE, SIZE, bias=False, dtype=BF16, config=config)
            warm(layer, x, dy)
            layer.fp8_site.state.keeps_weights = keeps
            found[f"{recipe}, {'later' if keeps else 'first'}"] = training(layer)
    return found


def warm(linear: Any, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Two iterations, so that delayed scales are there. Kernels write nothing: amaxes, and who has a scale, are said."""
    from megatron_fp8.nn import fp8_step

    for _ in range(2):
        linear(x).backward(dy)
        for arena in linear.fp8_site.state.arenas:
            arena.rows[0].fill_(1.0)
        fp8_step(linear)
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
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--each", type=int, default=4, help="calls a round")
    parser.add_argument("--only", default="", help="contenders whose name has this, besides nn.Linear")
    parser.add_argument("--profile", action="store_true", help="print where Python spends it instead")
    parser.add_argument(
        "--write", action="store_true", help="write the result files under benchmarks/results"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = no_op_gpu.install()
    work = {name: call for name, call in contenders().items() if args.only in name or name == NN}
    if args.profile:
        for name, call in work.items():
            if name != NN:
                _profile(name, call)
        return
    times = measured(work, args.rounds, args.each)
    counts = {name: launches(library, call) for name, call in work.items()}
    rows = [
        "| forward and backward | us | ratio | Triton launches |",
        "| --- | --- | --- | --- |",
    ]
    data: dict[str, Any] = {}
    for name, found in times.items():
        least, ratio, count = min(found), min(found) / min(times[NN]), counts[name]
        data[name] = {"us": least, "ratio": ratio, "launches": count}
        rows.append(f"| {name} | {least:.0f} | {ratio:.2f} | {count} |")
    table = "\n".join(rows)
    print(table)
    if args.write:
        record = environment(["triton"]) | {"measured": "CPU time of one thread, least of all rounds"}
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

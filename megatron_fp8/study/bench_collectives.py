"""Benchmark of an FP8 all-gather against BF16, among local processes.

Sequence parallelism and sharded FP8 weights use such all-gathers. It runs two processes over gloo on a CPU,
or one per GPU over nccl, started anew for each cell. With a single GPU it prints that nothing can be
measured.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from ..backends import BACKENDS
from ..plan.size_table import Gemm
from ..plan.timing import Timing, interleave_on
from ..recipe import Recipe, recipe_name
from .bench_linear import Bench


def collectives(bench: Bench, shape: Gemm, recipe: Recipe, backend: ModuleType) -> None:
    """Times an all-gather of [tokens, K], with an equal part of the tokens on each rank."""
    ranks = torch.cuda.device_count() if bench.device.type == "cuda" else 2
    if ranks < 2:
        print("collectives: not measured: they need two GPUs", file=sys.stderr, flush=True)
        return
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        out = Path(folder) / "times.json"
        arguments = (
            ranks,
            port,
            bench.device.type,
            tuple(shape),
            recipe,
            backend.name,
            bench.repetitions,
            str(out),
        )
        try:
            torch.multiprocessing.spawn(_rank, arguments, nprocs=ranks)
        except ProcessException as error:
            bench.fail(f"collectives {shape} {recipe_name(recipe)}: {str(error).strip().splitlines()[-1]}")
            return
        found = json.loads(out.read_text())
    if not found["right"]:
        bench.fail(f"collectives {shape} {recipe_name(recipe)}: what was gathered is not what was sent")
        return
    fp8, bf16 = (Timing(tuple(found[name])) for name in ("fp8", "bf16"))
    bench.add("collectives", shape, recipe_name(recipe), fp8, bf16)


def _rank(
    rank: int,
    ranks: int,
    port: int,
    kind: str,
    sizes: tuple[int, int, int],
    recipe: Recipe,
    backend: str,
    repetitions: int,
    out: str,
) -> None:
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch"
    )  # newer torch renames the gather
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)
    try:
        found = measure(rank, ranks, device, Gemm(*sizes), recipe, BACKENDS[backend], repetitions)
        if rank == 0:
            Path(out).write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def measure(
    rank: int, ranks: int, device: torch.device, shape: Gemm, recipe: Recipe, backend: Any, repetitions: int
) -> dict[str, Any]:
    """Seconds of both all-gathers on this rank, and whether all ranks received the right values."""
    rule = recipe.rule("input")
    assert rule is not None
    tokens_per_rank = -(-shape.tokens // ranks)
    parts = [
        torch.randn(
            tokens_per_rank,
            shape.k,
            generator=torch.Generator(device).manual_seed(i),
            device=device,
            dtype=torch.bfloat16,
        )
        for i in range(ranks)
    ]
    scale = torch.full((), 3.0, device=device, dtype=torch.float32) if rule.delayed else None

    def side(x: Tensor) -> tuple[Tensor, Tensor]:
        found = backend.quantize(x, rule, "rowwise", scale=scale).tensor.rowwise
        return found.codes.view(torch.uint8), found.scale_inv.reshape(-1).contiguous().view(torch.uint8)

    def gathered(x: Tensor) -> Tensor:
        whole = x.new_empty(ranks * x.numel())
        dist.all_gather_into_tensor(whole, x.reshape(-1))
        return whole

    def fp8() -> tuple[Tensor, Tensor]:
        codes, scales = side(parts[rank])
        return gathered(codes), gathered(scales)

    correct = True
    for found, expected in zip(fp8(), zip(*map(side, parts), strict=True), strict=True):
        correct &= torch.equal(found, torch.cat([tensor.reshape(-1) for tensor in expected]))
    agreed = torch.tensor(int(correct), dtype=torch.int64, device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    times = interleave_on(device, {"bf16": partial(gathered, parts[rank]), "fp8": fp8}, repetitions)
    return {"right": bool(agreed), **{name: timing.seconds for name, timing in times.items()}}

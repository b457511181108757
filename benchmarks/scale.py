"""Models of 1,000 layers and 100,000 sites on the meta device: what is done once a run and once an iteration.

    python -m benchmarks.scale [--write]

Of Megatron-Core's GPTModel, dense and with experts, and of plain linears that convert_to_fp8 converts: plan and names,
report, plan of a checkpoint, at several sizes; the amax update of delayed scaling; and tables of what ranks exchange in
an iteration, by the estimate's formulae. --write puts all into benchmarks/results, and one table of the latter into
docs/scaling.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import math
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import environment, put_between, table, write_results
from benchmarks.estimates import CONFIGS, LAYOUTS, TITLES
from megatron_fp8.estimate.communication import stage_traffic
from megatron_fp8.estimate.config_reader import Settings, read
from megatron_fp8.estimate.linear_communication import Traffic
from megatron_fp8.estimate.model import Chunk
from megatron_fp8.estimate.model_state import is_apart
from megatron_fp8.estimate.parameter_counts import chunk_parameters
from megatron_fp8.files.gc_pause import gc_paused

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- python -m benchmarks.scale --write: from here -->", "<!-- to here -->"
WORLDS = (8, 64, 512, 2048, 16384)
SHOWN = ("llama3_70b", (64, 16384))
"""Model and GPUs of the documentation's table."""
NAMES = ("llama3_8b", "llama3_70b", "deepseek_v3")
SITES_A_LAYER = 100
SIZES = {
    "dense": (250, 500, 1000), "experts": (100, 200, 1000), "linears": (100, 1000), "replicas": (1, 16, 64, 512),
}  # fmt: skip
"""What is measured -> layers, or ranks."""
EXPERTS = 49  # of two linears each, beside attention's two: 100 sites a layer


# ------------------------------------------------------------------------------------------------------- by formulae


def traffic(name: str, gpus: int) -> list[Traffic]:
    """What a rank of the first stage exchanges in an iteration of a shipped config; 1 microbatch of each data-parallel
    rank and stage, so that the work of a rank is the same on any number of ranks."""
    layouts = LAYOUTS[name]
    options = [f"--config={CONFIGS / name}.yaml", *layouts.get(gpus, layouts[max(layouts)])[1]]
    model = read(options).model
    batch = gpus // model.model_ranks * model.pipeline_model_parallel_size
    settings = read([*options, "--train.micro_batch_size=1", f"--train.global_batch_size={batch}"], gpus=gpus)
    chunks = [chunk for chunk in settings.model.chunks() if chunk.stage == 0]
    return stage_traffic(settings, chunks) + status_allreduces(settings, chunks)


def status_allreduces(settings: Settings, chunks: list[Chunk]) -> list[Traffic]:
    """The small status all-reduces (NaN and Inf, gradient norms) of a rank of these chunks' stage, one entry per call;
    none for groups of one rank.

    The estimate leaves them out: they have few bytes, but every rank waits for them. The loss is
    not included: the caller sums it. `megatron-fp8 train` does so in one all-reduce per iteration, with other
    status values (train/step.py).
    """
    model, distributed = settings.model, settings.optimizer.use_distributed_optimizer
    stages, gpus = model.pipeline_model_parallel_size, settings.gpus
    found = [("whether any rank met NaN or Inf in gradients", gpus, 4)]
    if model.fp8 and (
        stages > 1 or model.expert_model_parallel_size > 1
    ):  # otherwise part of the amax all-reduce
        found.append(("what casts met", gpus, 8))
    # An optimizer's group: all ranks with parts of its state, or of its model (Megatron-Core, optimizer.py,
    # get_grad_stats_parallel_group). Experts have their own optimizer.
    optimizers = [gpus if distributed else model.tensor_model_parallel_size * stages]
    if any(is_apart(model, parameter) for chunk in chunks for parameter in chunk_parameters(model, chunk)):
        optimizers.append(gpus if distributed else model.expert_ranks)
    found += [("whether an optimizer's gradients are finite", ranks, 4) for ranks in optimizers]
    if distributed:  # one for both optimizers; in float64 if FP8 weights have their own buffers
        found.append(("the norm of gradients", gpus, 8 if model.fp8 else 4))
    else:
        found += [("the norm of an optimizer's gradients", ranks, 4) for ranks in optimizers]
    return [Traffic(what, "all-reduce", "verdict", ranks, size) for what, ranks, size in found if ranks > 1]


def messages_of(traffic: Traffic) -> int:
    """Messages that a rank sends: the steps of a ring, two rounds for an all-reduce. An assumption: libraries also use
    trees and other algorithms, depending on the size."""
    if traffic.call == "send":
        return traffic.calls
    return traffic.calls * (traffic.ranks - 1) * (2 if traffic.call == "all-reduce" else 1)


def least(name: str, gpus: int) -> bool:
    """Whether so many GPUs hold the model in its layout."""
    layouts = LAYOUTS[name]
    model = read([f"--config={CONFIGS / name}.yaml", *layouts.get(gpus, layouts[max(layouts)])[1]]).model
    experts = model.expert_model_parallel_size * model.pipeline_model_parallel_size
    return gpus % model.model_ranks == 0 and gpus % experts == 0


def exchange(name: str, worlds: Sequence[int]) -> str:
    """A table: by kind of group, calls, messages and bytes that a rank sends."""
    rows = []
    for gpus in (gpus for gpus in worlds if least(name, gpus)):
        by_axis: dict[str, list[int]] = {}
        for one in traffic(name, gpus):
            sums = by_axis.setdefault(one.axis, [0, 0, 0, 0])
            sums[0] = max(sums[0], one.ranks)
            for index, value in enumerate((one.calls, messages_of(one), one.sent), 1):
                sums[index] += value
        for axis, (ranks, calls, messages, sent) in by_axis.items():
            rows.append(
                [f"{gpus:,}", axis, f"{ranks:,}", f"{calls:,}", f"{messages:,}", f"{sent / 1e6:,.3f}"]
            )
    return table(["GPUs", "group", "its ranks", "calls", "messages, by rings", "MB sent"], rows)


def exchanged() -> str:
    """The tables of all models."""
    parts = [f"### {TITLES[name]}\n\n{exchange(name, WORLDS)}" for name in NAMES]
    return "\n\n".join(["## What ranks exchange in an iteration, by formulae", *parts])


# ----------------------------------------------------------------------------------------------------------- measured


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """What is printed inside is not shown."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds of this thread's processor, result)."""
    start = time.thread_time()
    done = work()
    return time.thread_time() - start, done


def linears(layers: int) -> dict[str, float]:
    """Of a model of plain linears, 100 a layer, on the meta device; and the amax update of as many sites."""
    from megatron_fp8.nn import convert_to_fp8

    with torch.device("meta"):
        model = torch.nn.ModuleDict(
            {
                "layers": torch.nn.ModuleList(
                    torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(SITES_A_LAYER))
                    for _ in range(layers)
                )
            }
        )
    gc.collect()
    found: dict[str, float] = {"layers": layers, "sites": layers * SITES_A_LAYER}
    with quietly():
        found["plan"], model = timed(lambda: convert_to_fp8(model, "delayed"))
    found["report"], text = timed(lambda: json.dumps(model.fp8_report, default=str))
    found["report_bytes"] = len(text)
    found |= _checkpoint(_sharded(dict(model.named_parameters())))
    found |= _update(3 * layers * SITES_A_LAYER)
    return found


def _sharded(parameters: dict[str, torch.Tensor]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return {name: ShardedTensor.from_rank_offsets(name, one) for name, one in parameters.items()}


def gpt(layers: int, experts: int | None = None) -> Any:
    """Megatron-Core's GPTModel of small layers on the meta device, with this package's linears, delayed scaling. Inside
    ``model_parallel``."""
    from megatron.core.models.gpt import GPTModel

    from benchmarks.support.gpt import gpt_config
    from megatron_fp8 import TransformerConfig
    from megatron_fp8.mcore.spec import get_gpt_decoder_block_fp8_spec

    fields: dict[str, Any] = {"num_layers": layers, "fp8": "hybrid", "fp8_recipe": "delayed"}
    if experts:
        fields |= {"num_moe_experts": experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
    config = gpt_config(cls=TransformerConfig, perform_initialization=False, **fields)
    with torch.device("meta"):
        return GPTModel(
            config, get_gpt_decoder_block_fp8_spec(config), vocab_size=512, max_sequence_length=64
        )


def megatron(layers: int, experts: int | None = None) -> dict[str, float]:
    """Of a GPTModel on one rank: what Megatron-Core takes to build it, and what comes then."""
    from benchmarks.support.ranks import model_parallel
    from megatron_fp8.mcore.checkpoint.training_state import model_state
    from megatron_fp8.mcore.report import site_report
    from megatron_fp8.mcore.sites import check_plan

    gc.collect()
    found: dict[str, float] = {"layers": layers}
    with model_parallel(), quietly():
        found["build"], model = timed(lambda: gpt(layers, experts))
        found["plan"], _ = timed(lambda: check_plan([model]))
        found["report"], entries = timed(lambda: site_report([model]))
        found["report_bytes"], found["sites"] = len(json.dumps(entries)), len(entries)
        found["state"], state = timed(lambda: model_state([model]))
        found |= _checkpoint(state)
    return found


def _checkpoint(state: dict[str, Any]) -> dict[str, float]:
    """Of one rank's sharded tensors: shards, their plan, ``.metadata``."""
    from megatron_fp8.mcore.checkpoint.store import Shards, prepare

    with TemporaryDirectory() as folder:

        def plan() -> Any:
            shards = Shards(Path(folder), prepare(state, copy=False).tensors, 0)
            mine = shards.plan()
            shards.settle([mine])
            shards.finish([])
            return mine

        seconds, mine = timed(plan)
        return {
            "checkpoint": seconds,
            "tensors": len(mine.items),
            "checkpoint_bytes": (Path(folder) / ".metadata").stat().st_size,
        }


SHAPES = ((1_280, 8_192), (8_192, 1_024), (7_168, 8_192), (8_192, 3_584), (8_192,), (8_192,))
"""A layer's parameters in Llama-3 70B, of one of eight tensor parallel ranks."""
KINDS = {"": torch.bfloat16, "param.": torch.float32, "exp_avg.": torch.float32, "exp_avg_sq.": torch.float32}


def _runs(layers: int, ranks: int) -> list[list[tuple[str, tuple[int, ...], int, int]]]:
    """Of each rank of a sharded optimizer, parameters of which it holds some: name, shape, from where to where."""
    found: list[list[tuple[str, tuple[int, ...], int, int]]] = [[] for _ in range(ranks)]
    least, bucket = max(40_000_000, 1_000_000 * ranks), []  # Megatron-Core's own size of buckets
    parameters = [
        (f"{layer}.{index}", shape) for layer in range(layers) for index, shape in enumerate(SHAPES)
    ]
    for number, one in enumerate(parameters, 1):
        bucket.append(one)
        if (size := sum(math.prod(shape) for _, shape in bucket)) < least and number < len(parameters):
            continue
        share, at = -(-size // ranks), 0
        for name, shape in bucket:
            end = at + math.prod(shape)
            for rank in range(at // share, -(-end // share)):
                low, high = max(at, rank * share), min(end, (rank + 1) * share)
                found[rank].append((name, shape, low - at, high - at))
            at = end
        bucket = []
    return found


def replicas(ranks: int) -> dict[str, float]:
    """Of a save by so many ranks of a sharded optimizer: what the first rank does with all plans, and all places in
    files, that the others send; and what each rank takes to read ``.metadata``."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.storage import WriteResult

    from megatron_fp8.files.checkpoint import read_metadata
    from megatron_fp8.mcore.checkpoint.store import Shards, prepare
    from megatron_fp8.mcore.optimizer.sharded_state import split_into_boxes

    def state(runs: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, Any]:
        found = {}
        for name, shape, start, end in runs:
            whole = ShardedTensor.from_rank_offsets(
                name, torch.empty(shape, device="meta"), replica_id=(0, 0, 0)
            )
            for kind, dtype in KINDS.items():
                value = torch.empty(end - start, dtype=dtype, device="meta")
                found[kind + name] = split_into_boxes(whole, kind + name, value, start, replica=0)
        return found

    with TemporaryDirectory() as folder, gc_paused():
        plans, results = [], []
        for rank, runs in enumerate(_runs(20, ranks)):
            plan = Shards(Path(folder), prepare(state(runs), copy=False).tensors, rank).plan()
            plans.append(plan)
            file, at, places = f"__{rank}_0.distcp", 0, []
            for item in plan.items:
                data: Any = item.tensor_data
                size = data.chunk.sizes.numel() * data.properties.dtype.itemsize + 1_000
                places.append(WriteResult(item.index, size, _StorageInfo(file, at, size)))
                at += size
            results.append(places)
        told = pickle.dumps(plans), pickle.dumps(results)

        def settle() -> None:
            shards = Shards(Path(folder), {}, 0)
            shards.plan()
            shards.settle(pickle.loads(told[0]))
            shards.finish(pickle.loads(told[1]))

        first, _ = timed(settle)
        read, _ = timed(lambda: read_metadata(Path(folder)))
    return {
        "replicas": ranks, "tensors": sum(len(plan.items) for plan in plans), "settled": first, "read": read
    }  # fmt: skip


def _update(slots: int) -> dict[str, float]:
    """The amax update of so many delayed slots on this CPU, the median of seven; ms for 10,000 slots."""
    from megatron_fp8.numerics.formats import E4M3
    from megatron_fp8.recipe import DelayedScaling
    from megatron_fp8.state.arena import Arena

    arena, recipe = Arena(None, torch.device("cpu")), DelayedScaling()
    for _ in range(slots):
        arena.add(recipe, E4M3)
    times = []
    for iteration in range(8):
        arena.reduce()
        arena.rows[0].uniform_(0.5, 2)
        seconds, _ = timed(partial(arena.update, iteration))
        times.append(seconds)
    return {"slots": slots, "update_ms": statistics.median(times[1:]) * 1e3 * 10_000 / slots}


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "layers": ("layers", "{:,.0f}".format),
    "sites": ("sites", "{:,.0f}".format),
    "build": ("Megatron-Core's own building, s", "{:.1f}".format),
    "plan": ("plan, s", "{:.1f}".format),
    "report": ("report, s", "{:.2f}".format),
    "report_bytes": ("report, MB", lambda size: f"{size / 1e6:.1f}"),
    "state": ("state of the model, s", "{:.1f}".format),
    "checkpoint": ("checkpoint's plan, s", "{:.1f}".format),
    "replicas": ("replicas", "{:,.0f}".format),
    "tensors": ("its tensors", "{:,.0f}".format),
    "settled": ("first rank, s", "{:.2f}".format),
    "read": ("each rank reads, s", "{:.2f}".format),
    "checkpoint_bytes": (".metadata, MB", lambda size: f"{size / 1e6:.1f}"),
    "update_ms": ("amax update, ms for 10,000 slots", "{:.2f}".format),
}
"""What was measured -> its column and a cell of it."""


def shown_of(rows: list[dict[str, float]]) -> str:
    """A table."""
    columns = [(key, *COLUMNS[key]) for key in COLUMNS if key in rows[0]]
    return table(
        [title for _, title, _ in columns], [[cell(row[key]) for key, _, cell in columns] for row in rows]
    )


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/scaling.md and benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    found = {
        "dense": [megatron(layers) for layers in SIZES["dense"]],
        "experts": [megatron(layers, EXPERTS) for layers in SIZES["experts"]],
        "linears": [linears(layers) for layers in SIZES["linears"]],
        "replicas": [replicas(ranks) for ranks in SIZES["replicas"]],
    }
    torch.distributed.destroy_process_group()
    titles = {
        "dense": "Megatron-Core's GPTModel, four linears a layer",
        "experts": f"Megatron-Core's GPTModel with {EXPERTS} experts a layer",
        "linears": "Linears in any PyTorch model",
        "replicas": "First save with the distributed optimizer: 20 layers of Llama-3 70B, one of eight parts",
    }
    shown = "\n\n".join(f"{titles[kind]}:\n\n{shown_of(rows)}" for kind, rows in found.items())
    record = {**environment(["megatron-core"]), "measured": "CPU time of one thread; updates: medians of 7"}
    print(shown)
    if options.write:
        command = "python -m benchmarks.scale --write"
        write_results("scale", "100,000 sites", command, record, f"{shown}\n\n{exchanged()}", found)
        put_between(PAGE, BEGIN, END, exchange(*SHOWN))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

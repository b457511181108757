"""A model of 1,000 layers and 100,000 sites on the meta device: what is done once a run and once an iteration.

    python -m benchmarks.scale [--write]

Plan and names (convert_to_fp8), report, plan of a checkpoint, and the amax update of delayed scaling, at two sizes; and
tables of what ranks exchange in an iteration, by the estimate's formulae. --write puts both into docs/scaling.md and the
figures into benchmarks/results.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import describe, environment, put_between, table, write_results
from benchmarks.estimates import CONFIGS, LAYOUTS, TITLES
from megatron_fp8.estimate.settings import read
from megatron_fp8.estimate.sites import Plans
from megatron_fp8.estimate.wire import of_stage
from megatron_fp8.estimate.wire_linear import Traffic

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- python -m benchmarks.scale --write: from here -->", "<!-- to here -->"
WORLDS = (8, 64, 512, 2048, 16384)
NAMES = ("llama3_8b", "llama3_70b", "deepseek_v3")
SITES_A_LAYER = 100


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
    return of_stage(settings, chunks, Plans(settings.model))


def least(name: str, gpus: int) -> bool:
    """Whether so many GPUs hold the model in its layout."""
    layouts = LAYOUTS[name]
    model = read([f"--config={CONFIGS / name}.yaml", *layouts.get(gpus, layouts[max(layouts)])[1]]).model
    experts = model.expert_model_parallel_size * model.pipeline_model_parallel_size
    return gpus % model.model_ranks == 0 and gpus % experts == 0


def exchanged() -> str:
    """A table of each model: by kind of group, calls, messages and bytes that a rank sends."""
    parts = []
    for name in NAMES:
        rows = []
        for gpus in (gpus for gpus in WORLDS if least(name, gpus)):
            by_axis: dict[str, list[int]] = {}
            for one in traffic(name, gpus):
                sums = by_axis.setdefault(one.axis, [0, 0, 0, 0])
                sums[0] = max(sums[0], one.ranks)
                for index, value in enumerate((one.calls, one.messages, one.sent), 1):
                    sums[index] += value
            for axis, (ranks, calls, messages, sent) in by_axis.items():
                rows.append(
                    [f"{gpus:,}", axis, f"{ranks:,}", f"{calls:,}", f"{messages:,}", f"{sent / 1e6:,.3f}"]
                )
        header = ["GPUs", "group", "its ranks", "calls", "messages sent", "MB sent"]
        parts.append(f"### {TITLES[name]}\n\n{table(header, rows)}")
    return "\n\n".join(parts)


# ----------------------------------------------------------------------------------------------------------- measured


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds of this thread's processor, result)."""
    start = time.thread_time()
    done = work()
    return time.thread_time() - start, done


def measure(layers: int) -> dict[str, float]:
    """Of a model of so many layers on the meta device."""
    from megatron_fp8.nn import convert_to_fp8

    found: dict[str, float] = {"layers": layers, "sites": layers * SITES_A_LAYER}
    with torch.device("meta"):
        model = torch.nn.ModuleDict(
            {
                "layers": torch.nn.ModuleList(
                    torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(SITES_A_LAYER))
                    for _ in range(layers)
                )
            }
        )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        found["plan"], model = timed(lambda: convert_to_fp8(model, "delayed"))
    found["report"], text = timed(lambda: json.dumps(model.fp8_report, default=str))
    found["report_bytes"] = len(text)
    found |= _checkpoint(dict(model.named_parameters()))
    found |= _update(3 * layers * SITES_A_LAYER)
    return found


def _checkpoint(parameters: dict[str, torch.Tensor]) -> dict[str, float]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from megatron_fp8.mcore.checkpoint.store import Shards, prepare

    state = {name: ShardedTensor.from_rank_offsets(name, one) for name, one in parameters.items()}
    with TemporaryDirectory() as folder:

        def plan() -> Any:
            shards = Shards(Path(folder), prepare(state, copy=False).tensors, 0)
            mine = shards.plan()
            shards.settle([mine])
            shards.finish([])
            return shards

        seconds, _ = timed(plan)
        return {"checkpoint": seconds, "checkpoint_bytes": (Path(folder) / ".metadata").stat().st_size}


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


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/scaling.md and benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    found = [measure(layers) for layers in (100, 1000)]
    torch.distributed.destroy_process_group()
    rows = [
        [f"{one['layers']:,.0f}", f"{one['sites']:,.0f}", f"{one['plan']:.1f}", f"{one['report']:.2f}",
         f"{one['report_bytes'] / 1e6:.1f}", f"{one['checkpoint']:.1f}", f"{one['checkpoint_bytes'] / 1e6:.1f}",
         f"{one['update_ms']:.2f}"]
        for one in found
    ]  # fmt: skip
    header = ["layers", "sites", "plan, s", "report, s", "report, MB", "checkpoint's plan, s",
              ".metadata, MB", "amax update, ms for 10,000 slots"]  # fmt: skip
    record = {**environment(["megatron-core"]), "measured": "CPU time of one thread; updates: medians of 7"}
    shown = table(header, rows)
    print(shown)
    if options.write:
        command = "python -m benchmarks.scale --write"
        write_results("scale", "100,000 sites", command, record, shown, found)
        put_between(PAGE, BEGIN, END, f"{describe(record)}\n\n{shown}\n\n## In numbers\n\n{exchanged()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

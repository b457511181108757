"""What telemetry costs a training step on a CPU: `python benchmarks/telemetry.py`.

The GPT and the step of benchmarks/step.py, with tensorwise scales. One model takes turns: without telemetry, in
iterations that are measured (all sites, all tensors, the default statistics, no what-ifs, written to a folder), in the
one after it, and in iterations between. Of every tenth iteration measured, a run pays (measured + after + 8 between) /
10. Goal: <= 3 % of the step without. The bytes that forwards save for backward are counted, and must be the same. (Three
models, one for each, differed by 2 % where nothing of telemetry ran: by where their memory lay.)
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common import (
    argument_parser,
    clock_of,
    command_line,
    describe,
    environment,
    interleave,
    keep_memory,
    table,
    write_results,
)
from benchmarks.one_rank import one_rank
from benchmarks.step import BATCH, SEQUENCE, Contender, build
from megatron_fp8.state.observer_protocol import Observer
from megatron_fp8.telemetry import Telemetry

EVERY, GOAL, RECIPE = 10, 0.03, "tensorwise"
NEVER = 2**31 - 1


def saved_bytes(contender: Contender) -> int:
    """Bytes of the tensors that a step's forward saves for its backward."""
    total = 0

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        contender.step()
    return total


def main() -> int:
    """Gate, time, print; exit code 1 where the goal is missed."""
    parser = argument_parser((__doc__ or "").splitlines()[0], repetitions=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    clock, measured = clock_of(args)
    record = {**environment(["megatron-core"]), "measured": f"{measured}, {BATCH} x {SEQUENCE} tokens"}
    print(describe(record), flush=True)
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        contender = build(RECIPE)
        measuring = Telemetry([contender.model], every=1, folder=folder)
        (state,) = measuring.states
        watchers: dict[str, Observer | None] = {"off": None, "measured": state.watcher}
        state.watch(None)
        waiting = Telemetry([contender.model], every=NEVER)
        watchers["between"] = state.watcher

        def watched_by(watcher: Observer | None) -> None:
            state.watch(None)
            state.watch(watcher)

        saved, losses = [], []
        for watcher in watchers.values():
            watched_by(watcher)
            saved.append(saved_bytes(contender))
            losses.append(contender.loss)
        assert saved[0] == saved[1] == saved[2], f"telemetry saves tensors for backward: {saved} bytes"
        assert losses[0] == losses[1] == losses[2], "telemetry changes the loss"
        assert len(measuring.records) == 8 * 4 * 6 and not waiting.records

        def step_of(watcher: Observer | None) -> Callable[[], None]:
            def step() -> None:
                watched_by(watcher)
                contender.step()

            return step

        # The one after a measured one finds other caches, and pays for its garbage; the others do not come after it.
        turns = {"measured": "measured", "after": "between", "off": "off", "between": "between"}
        steps = {name: step_of(watchers[kind]) for name, kind in turns.items()}
        times = interleave(steps, args.repetitions, clock=clock)
        measuring.close()
        waiting.close()
    return report(times, saved[0], record, write=args.write)


def report(times: dict[str, Any], saved: int, record: dict[str, Any], *, write: bool) -> int:
    """Print the table; the exit code."""
    ratios = {name: timing.ratio_to(times["off"]) for name, timing in times.items()}
    rows = [
        [name, f"{timing.median * 1e3:.1f}", f"{ratios[name][0] - 1:+.1%}", f"{ratios[name][1]:.0%}"]
        for name, timing in times.items()
    ]
    of_ten = ratios["measured"][0] + ratios["after"][0] + (EVERY - 2) * ratios["between"][0]
    cost = of_ten / EVERY - 1
    met = "met" if cost <= GOAL else "MISSED"
    verdict = f"every {EVERY}th iteration: {cost:+.1%} of the step (goal <= {GOAL:.0%}: {met})"
    body = table(["iteration", "median ms", "against off", "spread"], rows)
    body += f"\n\n{verdict}\n\nSaved for backward in each: {saved:,} bytes."
    print(body)
    if write:
        data = {name: list(timing.seconds) for name, timing in times.items()}
        write_results("telemetry", "What telemetry costs a step", command_line(), record, body, data)
    return 0 if cost <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())

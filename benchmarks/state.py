"""Delayed scaling's update of 10,000 tensors, once an iteration, on one thread: `python benchmarks/state.py`.

Goal: <= 1 ms, with a history of 1, of 16 and of 1024, Transformer Engine's default.
Scales are checked against plain Python before any time is taken.
"""

from __future__ import annotations

import sys
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
    table,
    write_results,
)
from megatron_fp8.numerics.formats import E4M3, E5M2
from megatron_fp8.recipe import DelayedScaling
from megatron_fp8.state.fp8_state import Fp8State

SLOTS = 10_000
GOAL_MS = 1.0
CASES = [(length, algo) for length in (1, 16, 1024) for algo in ("most_recent", "max")]


def update_of(length: int, algo: Any) -> Callable[[], None]:
    """One iteration's amaxes put into place, and the update; all slots are warm (two in three E4M3)."""
    arena = Fp8State().arena(None)
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algo)
    for i in range(SLOTS):
        arena.add(recipe, E5M2 if i % 3 == 2 else E4M3)
    amaxes = torch.rand(SLOTS, generator=torch.Generator().manual_seed(0)) + 0.5
    arena.update(0)
    iteration = 0

    def update() -> None:
        nonlocal iteration
        iteration += 1
        arena.rows[0].copy_(amaxes)
        arena.update(iteration)

    update()
    for i in range(0, SLOTS, 97):
        largest = torch.tensor(57344.0 if i % 3 == 2 else 448.0)
        assert arena.scale[i] == largest / amaxes[i], (
            f"slot {i}: wrong scale; no time is printed for a wrong result"
        )
    return update


def main() -> int:
    """Gate, time, print; exit code 1 where the goal is missed."""
    parser = argument_parser(__doc__.splitlines()[0], repetitions=200)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock, measured = clock_of(args)
    record = {**environment([]), "measured": measured}
    print(describe(record), flush=True)
    updates = {f"history {length}, {algo}": update_of(length, algo) for length, algo in CASES}
    times = interleave(updates, args.repetitions, clock=clock)
    rows, data = [], []
    for name, timing in times.items():
        ms = timing.median * 1e3
        met = ms <= GOAL_MS
        goal = f"<= {GOAL_MS:g} ms {'met' if met else 'MISSED'}"
        rows.append([name, f"{SLOTS:,}", f"{ms:.3f}", f"{timing.spread:.0%}", goal])
        data.append(
            {
                "case": name,
                "slots": SLOTS,
                "seconds": timing.seconds,
                "goal_ms": GOAL_MS,
                "met": met,
            }
        )
    body = table(["update", "tensors", "median ms", "spread", "goal"], rows)
    print(body)
    if args.write:
        title = "Delayed scaling: one update of all tensors"
        write_results("state", title, command_line(), record, body, data)
    return int(not all(entry["met"] for entry in data))


if __name__ == "__main__":
    raise SystemExit(main())

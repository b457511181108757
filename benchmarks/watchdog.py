"""What the watchdog costs a training step on a CPU: `python -m benchmarks.watchdog --cpu-time --threads 1`.

Steps of a GPT of Megatron-Core (benchmarks/step.py, hidden size 256, MXFP8), in blocks that take turns: without a
watchdog, with one, and without one again, which says how far two equal blocks differ here. It watches as one of two ranks
does: ten looks a second, each of which reads a clock and the main thread's innermost frame. How much of a core its
thread takes, waking up included, is read from that thread's own CPU clock.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.common import (
    Timing,
    argument_parser,
    clock_of,
    describe,
    environment,
    interleave,
    keep_memory,
    table,
    write_results,
)
from benchmarks.one_rank import one_rank
from megatron_fp8.train.health.watchdog import Watchdog

if TYPE_CHECKING:
    from benchmarks.step import Contender

STEPS, HIDDEN, RECIPE = 4, 256, "mxfp8"


class Counted(Watchdog):
    """A watchdog that counts its looks."""

    looks = 0

    def look(self) -> None:
        """As the watching thread does, ten times a second."""
        self.looks += 1
        super().look()


def watched(contender: Contender, folder: Path) -> tuple[int, float, float]:
    """A block of steps under a watchdog: looks, CPU seconds of its thread, seconds."""
    dog = Counted(folder, 0, 2, least=600.0, limit=1800.0, say=print)
    for known in range(1, 5):  # it looks where the main thread is from the fourth step on
        dog.enter("step", known)
    dog.start()
    (thread,) = (each for each in threading.enumerate() if each.name == "watchdog")
    assert thread.ident is not None
    start = time.perf_counter()
    for step in range(STEPS):
        dog.enter("step", 5 + step)
        contender.step()
    seconds = time.perf_counter() - start
    used = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    dog.close()
    assert not list(folder.iterdir()), "it wrote something"
    return dog.looks, used, seconds


def main() -> int:
    """Time, print, write."""
    from benchmarks.step import BATCH, SEQUENCE, build  # which switches torch.compile off

    parser = argument_parser((__doc__ or "").splitlines()[0], repetitions=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    clock, measured = clock_of(args)
    record = {**environment(["megatron-core"]), "measured": f"{measured}, {BATCH} x {SEQUENCE} tokens"}
    print(describe(record), flush=True)
    seen: list[tuple[int, float, float]] = []
    with one_rank(), tempfile.TemporaryDirectory() as folder:
        contender = build(RECIPE, HIDDEN)

        def without() -> None:
            for _ in range(STEPS):
                contender.step()

        blocks = {
            "without": without,
            "with": lambda: seen.append(watched(contender, Path(folder))),
            "without again": without,
        }
        times = interleave(blocks, args.repetitions, clock=clock)
    command = " ".join(["python -m benchmarks.watchdog", *sys.argv[1:]])
    report(times, seen, record, command if args.write else "")
    return 0


def report(
    times: dict[str, Timing], seen: list[tuple[int, float, float]], record: dict[str, Any], command: str
) -> None:
    """Print the table, and keep it where there is a command to keep it with."""
    rows = []
    for name, timing in times.items():
        ratio, spread = timing.ratio_to(times["without"])
        rows.append([name, f"{timing.median / STEPS * 1e3:.1f}", f"{ratio:.4f}", f"{spread:.1%}"])
    look = median(used / looks for looks, used, _ in seen)
    share = median(used / seconds for _, used, seconds in seen)
    rate = median(looks / seconds for looks, _, seconds in seen)
    body = table(["steps", "median ms a step", "against without", "spread"], rows)
    body += (
        f"\n\nThe watching thread: {rate:.1f} looks a second, {look * 1e6:.0f} µs of CPU time each, {share:.3%} of a core"
        f" (medians of {len(seen)} blocks)."
    )
    print(body)
    if command:
        data: dict[str, Any] = {name: list(timing.seconds) for name, timing in times.items()}
        data["looks, CPU seconds, seconds"] = seen
        write_results("watchdog", "What the watchdog costs a step", command, record, body, data)


if __name__ == "__main__":
    raise SystemExit(main())

"""What every benchmark shares: interleaved timing, a record of the machine, tables, and result files.

Times on a shared machine drift, so contenders are never timed one after another: each repetition runs all of
them once, in turn, and a ratio is the median of the ratios inside the repetitions.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender, one number for each repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range as a fraction of the median; 0 for fewer than four repetitions."""
        return _spread(self.seconds)

    def ratio_to(self, other: Timing) -> tuple[float, float]:
        """(median, relative interquartile range) of self / other, repetition by repetition."""
        ratios = [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]
        return statistics.median(ratios), _spread(ratios)


def _spread(values: Sequence[float]) -> float:
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def interleave(
    contenders: Mapping[str, Callable[[], Any]],
    repetitions: int,
    *,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Run all contenders in turn, `repetitions` times over, after `warmup` untimed rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(-warmup, repetitions):
        for name, run in contenders.items():
            start = clock()
            run()
            if repetition >= 0:
                seconds[name].append(clock() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def keep_memory() -> None:
    """Tells glibc's malloc to reuse large blocks: by default every tensor of 32 MiB or more is mapped, zeroed page by
    page, and unmapped again, for all contenders alike, and that hides the work that is to be compared."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Date, processor, cores and threads in use, Python and the versions of the packages named."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", *packages)},
    }


def processor_name() -> str:
    """The processor's name as the kernel gives it, or the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def describe(record: Mapping[str, Any]) -> str:
    """One line of an environment record."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{record['processor']}, {record['cores']} cores, {record['threads']} threads ({record['capability']}), "
        f"Python {record['python']}, {versions}, {record['date']}; {record['measured']}"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too; all but the first column to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w) if i == 0 else ("-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def write_results(
    name: str, title: str, command: str, record: Mapping[str, Any], body: str, data: Any
) -> None:
    """results/<name>.json with all data, results/<name>.md with what was printed and how to get it again."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(
        json.dumps({"environment": record, "results": data}, indent=1) + "\n"
    )
    (RESULTS / f"{name}.md").write_text(f"# {title}\n\n`{command}`\n\n{describe(record)}\n\n{body}\n")
    print(f"wrote {RESULTS / name}.json and .md")


def command_line() -> str:
    """This benchmark's command, as it was given."""
    return " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])


def argument_parser(description: str, repetitions: int) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--repetitions", type=int, default=repetitions, help="timed rounds (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="threads (default %(default)s)"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="time CPU, not the wall: for a machine that others use"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the result files under benchmarks/results"
    )
    return parser


def clock_of(args: argparse.Namespace) -> tuple[Callable[[], float], str]:
    """(the clock asked for, what it measures). CPU time adds up over threads, so it asks for one."""
    if not args.cpu_time:
        return time.perf_counter, "wall time"
    if args.threads != 1:
        raise SystemExit("--cpu-time adds up over threads: give --threads 1 too")
    return time.process_time, "CPU time of one thread"

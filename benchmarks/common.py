"""What every benchmark shares: interleaved timing (plan/timing.py), a record of the machine, and result files."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.support.commit import commit
from megatron_fp8 import __version__
from megatron_fp8.plan.timing import Timing, interleave, processor_name, table

__all__ = [
    "RESULTS",
    "Timing",
    "argument_parser",
    "clock_of",
    "command_line",
    "describe",
    "environment",
    "interleave",
    "keep_memory",
    "processor_name",
    "put_between",
    "table",
    "write_results",
]

RESULTS = Path(__file__).parent / "results"


def keep_memory() -> None:
    """Tells glibc's malloc to reuse large blocks: by default every tensor of 32 MiB or more is mapped, zeroed page by
    page, and unmapped again, for all contenders alike, and that hides the work that is to be compared."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_max = -1, -4
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """Date, processor, cores and threads in use, Python, this package's version and commit (None without a checkout),
    and the versions of the packages named."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability()
        + (" and AMX" if torch.cpu._is_amx_tile_supported() else ""),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "commit": commit(),
        "versions": {
            "megatron_fp8": __version__,
            **{name: importlib.metadata.version(name) for name in ("torch", *packages)},
        },
    }


def describe(record: Mapping[str, Any]) -> str:
    """One line of an environment record."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    threads = "1 thread" if record["threads"] == 1 else f"{record['threads']} threads"
    return (
        f"{record['processor']}, {record['cores']} cores, {threads} ({record['capability']}), "
        f"Python {record['python']}, {versions}{_at(record)}, {record['date']}; {record['measured']}"
    )


def _at(record: Mapping[str, Any]) -> str:
    return f", commit {record['commit']}" if record.get("commit") else ""


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


def put_between(path: Path, begin: str, end: str, text: str) -> None:
    """Put text between two lines of a page, each an HTML comment that stays."""
    page = path.read_text(encoding="utf-8")
    before, _, rest = page.partition(f"{begin}\n")
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has no lines {begin!r} and {end!r}")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


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

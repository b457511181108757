"""Interleaved timing on CPU and GPU, and the machine's name, for benchmarks.

Times on a shared machine drift, so contenders are never timed one after another: each repetition runs all of them
once, in turn, and a ratio is the median over the ratios within repetitions.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LEAST_FOR_SPREAD = 4
"""Repetitions needed for quartiles."""
_L2_BYTES = 256 * 2**20  # more than any L2 cache holds


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
        """Interquartile range as a fraction of the median; 0 for fewer than LEAST_FOR_SPREAD repetitions."""
        return _spread(self.seconds)

    def ratio_to(self, other: Timing) -> tuple[float, float]:
        """(median, relative interquartile range) of self / other, repetition by repetition."""
        ratios = [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]
        return statistics.median(ratios), _spread(ratios)


def _spread(values: Sequence[float]) -> float:
    if len(values) < LEAST_FOR_SPREAD:
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
    """Times all contenders on the CPU in turn, `repetitions` times, after `warmup` untimed rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(-warmup, repetitions):
        for name, run in contenders.items():
            start = clock()
            run()
            if repetition >= 0:
                seconds[name].append(clock() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def interleave_on(
    device: torch.device, contenders: Mapping[str, Callable[[], Any]], repetitions: int, *, warmup: int = 2
) -> dict[str, Timing]:
    """``interleave`` on a device. On a GPU: between two CUDA events, with a cold L2 cache.

    Time in which the GPU waits for Python counts, as in training without CUDA graphs.
    """
    if device.type == "cpu":
        return interleave(contenders, repetitions, warmup=warmup)
    flush = torch.empty(_L2_BYTES, dtype=torch.uint8, device=device)
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in contenders}
    for repetition in range(-warmup, repetitions):
        for name, run in contenders.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            run()
            end.record()
            if repetition >= 0:
                marks[name].append((start, end))
    torch.cuda.synchronize(device)
    return {
        name: Timing(tuple(start.elapsed_time(end) * 1e-3 for start, end in pairs))
        for name, pairs in marks.items()
    }


def device_label(device: torch.device) -> str:
    """Returns the GPU's or processor's name, for timing results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def unused_gpu_reason(
    environ: Mapping[str, str] = os.environ, driver: Path = Path("/dev/nvidiactl")
) -> str | None:
    """Returns why torch does not use this machine's NVIDIA GPU; None if it does, or none is visible on purpose."""
    if torch.cuda.is_available() or not driver.exists() or environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for the CPU; docs/installation.md lists builds for CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return " ".join(str(error).split())
    return "torch sees no device: look at nvidia-smi"


def processor_name() -> str:
    """Returns the processor's name as the kernel reports it, or the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a Markdown table with aligned columns; all but the first are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w) if i == 0 else ("-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])

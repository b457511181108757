"""What the GPU check and the GPU benchmark share: the machine that a check is handed, recipes, timing, captured graphs.

Both run where there is torch and Triton, a GPU, and no network. A dry run walks through all of it on the CPU, in small
sizes, with the emulated backend: numbers of no meaning, and the tests' way to run this code.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common import Timing
from benchmarks.gpu_environment import EXIT_NO_GPU
from benchmarks.gpu_plan import NotRun
from megatron_fp8 import Format, recipe

RECIPES: dict[str, Any] = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "tensorwise": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(fp8_format=Format.HYBRID),
    "blockwise": recipe.Float8BlockScaling(),
    "blockwise-fp32": recipe.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": recipe.MXFP8BlockScaling(),
}
WITH_FP4 = RECIPES | {"nvfp4": recipe.NVFP4BlockScaling()}


def silent(**event: Any) -> None:
    """Tells nobody."""


@dataclass
class Machine:
    """Where things run: a GPU with the native backend, or, dry, the CPU with the emulated one.

    deadline: seconds that a check may take; more, and it is ended from outside. tell(row=...), tell(result=...): keeps
    something at once, before the check has ended. peaks: that the run has measured, by contender (gpu_kernels.roofline).
    repetitions: of timings.
    """

    device: torch.device
    dry: bool
    deadline: float = math.inf
    tell: Callable[..., None] = silent
    peaks: Mapping[str, float] = field(default_factory=dict)
    repetitions: int = 20
    start: float = field(default_factory=time.monotonic)

    @property
    def backend(self) -> Any:
        """The backend under test."""
        from megatron_fp8.backends import BACKENDS

        return BACKENDS["emulated" if self.dry else "native"]

    @property
    def left(self) -> float:
        """Seconds until the check's time is over."""
        return self.deadline - (time.monotonic() - self.start)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def empty(self) -> None:
        """Give cached memory back between sections."""
        if not self.dry:
            torch.cuda.empty_cache()


def open_machine(dry: bool) -> Machine:
    """The machine; SystemExit(3) with a message if there is no GPU whose FP8 units can be used."""
    from megatron_fp8.backends.native import backend as native

    if dry:
        return Machine(torch.device("cpu"), True)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    reason = native.supports(device or torch.device("cpu"))
    if device is None or reason is not None:
        print(
            f"error: no GPU to run on: {reason}. `--dry-run` walks through this on the CPU, in small sizes.",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_NO_GPU)
    return Machine(device, False)


def supported(machine: Machine, name: str) -> Any:
    """The recipe; NotRun if the backend under test does not do it on this device."""
    reason = machine.backend.supports(machine.device, WITH_FP4[name])
    if reason is not None:
        raise NotRun(reason)
    return WITH_FP4[name]


# --------------------------------------------------------------------------------------------------------- timing


class Clock:
    """Times contenders in turn, on the device, with a cold L2.

    GPU: between two CUDA events; before each, 256 MiB are written, which no L2 holds. CPU: the wall clock.
    """

    def __init__(self, machine: Machine):
        self.machine = machine
        size = 1 if machine.dry else 256 * 2**20
        self._flush = torch.empty(size, dtype=torch.uint8, device=machine.device)

    def interleave(
        self, contenders: Mapping[str, Callable[[], Any]], repetitions: int, warmup: int = 3
    ) -> dict[str, Timing]:
        """Run all contenders in turn, `repetitions` times over, after `warmup` untimed rounds; seconds of each."""
        for _ in range(warmup):
            for run in contenders.values():
                run()
        self.machine.synchronize()
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contenders}
        for _ in range(repetitions):
            for name, run in contenders.items():
                self._flush.zero_()
                start = self._mark()
                run()
                marks[name].append((start, self._mark()))
        self.machine.synchronize()
        return {name: Timing(tuple(self._seconds(*pair) for pair in pairs)) for name, pairs in marks.items()}

    def _mark(self) -> Any:
        if self.machine.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        return end - start if self.machine.dry else start.elapsed_time(end) * 1e-3


def graphed(machine: Machine, run: Callable[[], Any]) -> Callable[[], Any]:
    """run as a captured CUDA graph, so that its time is the GPU's and not that of launching from Python. CPU: run.

    Raises:
        RuntimeError: something inside cannot be captured.
    """
    if machine.dry:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@contextmanager
def no_synchronisation(machine: Machine) -> Iterator[None]:
    """Where the host waits for the GPU inside, a RuntimeError says so."""
    if machine.dry:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -------------------------------------------------------------------------------------------------------- numbers


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact values; Inf if anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    size = exact.double().square().mean().sqrt()
    return float((found.double() - exact.double()).square().mean().sqrt() / size)


def ratio(timing: Timing, other: Timing) -> float:
    """Median of other / self over the repetitions: how many times faster than the other this is."""
    return statistics.median(b / a for a, b in zip(timing.seconds, other.seconds, strict=True))

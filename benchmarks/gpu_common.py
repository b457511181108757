"""What the GPU check and the GPU benchmark share: the machine, what it lacks, timing, and result files.

Both run where there is torch and Triton, a GPU, and no network. Without a GPU they end with a message and exit code 3,
but for ``--dry-run``, which walks through all of it on the CPU, in small sizes, with the emulated backend: numbers of
no meaning, and the tests' way to run this code.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, Timing

EXIT_FAILED, EXIT_NO_GPU = 1, 3
ROOT = Path(__file__).resolve().parent.parent

# (module, distribution, what it is for): what may be missing on a machine that has torch, Triton and the usual rest.
CARRY = (
    ("megatron", "megatron-core==0.16.1", "training and steps"),
    ("einops", "einops>=0.8", "megatron-core"),
    ("jsonargparse", "jsonargparse==4.53.0", "megatron-fp8 train"),
    ("docstring_parser", "docstring-parser", "jsonargparse"),
    ("typeshed_client", "typeshed-client", "jsonargparse"),
    ("torchao", "torchao==0.18.0", "the comparison with torchao"),
    (
        "transformer_engine",
        "transformer-engine[pytorch]",
        "the comparison with Transformer Engine; built, not carried",
    ),
)
VERSIONS = ("torch", "triton", "megatron-core", "torchao", "transformer-engine", "numpy")
NOT_MEASURED = "not measured"


class NotRun(Exception):
    """A check does not apply here; its text says why."""


@dataclass
class Machine:
    """Where things run: a GPU with the native backend, or, dry, the CPU with the emulated one."""

    device: torch.device
    dry: bool
    deadline: float
    start: float = field(default_factory=time.monotonic)

    @property
    def backend(self) -> Any:
        """The backend under test."""
        from megatron_fp8.backends import BACKENDS

        return BACKENDS["emulated" if self.dry else "native"]

    @property
    def left(self) -> float:
        """Seconds until the time that the whole may take is over."""
        return self.deadline - (time.monotonic() - self.start)

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.dry:
            torch.cuda.synchronize()

    def empty(self) -> None:
        """Give cached memory back between sections."""
        if not self.dry:
            torch.cuda.empty_cache()


def open_machine(dry: bool, seconds: float) -> Machine:
    """The machine; SystemExit(3) with a message if there is no GPU whose FP8 units can be used."""
    from megatron_fp8.backends import native

    missing = missing_packages()
    if missing:
        print("missing here (make gpu-wheels, on a machine with network, downloads what can be carried):")
        for _, distribution, purpose in missing:
            print(f"  {distribution:<30} {purpose}")
    if dry:
        return Machine(torch.device("cpu"), True, seconds)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    reason = native.supports(device or torch.device("cpu"))
    if device is None or reason is not None:
        print(
            f"error: no GPU to run on: {reason}. `--dry-run` walks through this on the CPU, in small sizes.",
            file=sys.stderr,
        )
        raise SystemExit(EXIT_NO_GPU)
    return Machine(device, False, seconds)


def missing_packages() -> list[tuple[str, str, str]]:
    """The entries of CARRY that are not installed."""
    return [entry for entry in CARRY if importlib.util.find_spec(entry[0]) is None]


def environment(machine: Machine) -> dict[str, Any]:
    """Date, device, versions, the commit, and the GPU's power state."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"])
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "device": "CPU (dry run)" if machine.dry else torch.cuda.get_device_name(machine.device),
        "python": platform.python_version(),
        "versions": found,
        "commit": commit or "unknown",
        "dry": machine.dry,
    }
    if not machine.dry:
        properties = torch.cuda.get_device_properties(machine.device)
        record |= {
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "power": power_state(),
        }
    return record


def power_state() -> dict[str, str]:
    """What nvidia-smi says of power and clocks; empty where it does not answer."""
    names = (
        "driver_version,pstate,power.draw,power.limit,clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,"
        "clocks_event_reasons.active"
    )
    text = _output(["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"])
    values = [value.strip() for value in text.splitlines()[0].split(",")] if text else []
    return dict(zip(names.split(","), values, strict=False))


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def describe(record: Mapping[str, Any]) -> str:
    """One line of an environment record."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    power = record.get("power", {})
    state = ", ".join(
        f"{k} {power[k]}" for k in ("power.limit", "clocks.max.sm", "driver_version") if k in power
    )
    cuda = f", CUDA {record['cuda']}" if record.get("cuda") else ""
    where = f"{record['device']}{cuda}, Python {record['python']}, {versions}"
    return f"{where}, commit {record['commit']}, {record['date']}" + (f"; {state}" if state else "")


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


# -------------------------------------------------------------------------------------------------------- results


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact values; Inf if anything is not finite."""
    if not bool(found.isfinite().all()):
        return float("inf")
    size = exact.double().square().mean().sqrt()
    return float((found.double() - exact.double()).square().mean().sqrt() / size)


def write(
    name: str, title: str, record: Mapping[str, Any], body: str, data: Any, folder: Path | None
) -> None:
    """<folder>/<name>.json and .md; benchmarks/results where none is given and it was no dry run."""
    if folder is None:
        if record["dry"]:
            print("dry run: no result file is written")
            return
        folder = RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(
        json.dumps({"environment": record, "results": data}, indent=1) + "\n"
    )
    (folder / f"{name}.md").write_text(f"# {title}\n\n{describe(record)}\n\n{body}\n")
    print(f"wrote {folder / name}.json and .md")


def milliseconds(timing: Timing) -> str:
    """Median and spread, as tables have it."""
    return f"{timing.median * 1e3:.3g} ms ± {timing.spread:.0%}"


def ratio(timing: Timing, other: Timing) -> float:
    """Median of other / self over the repetitions: how many times faster than the other this is."""
    return statistics.median(b / a for a, b in zip(timing.seconds, other.seconds, strict=True))

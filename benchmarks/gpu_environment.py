"""Where GPU results come from: device, versions, clocks, the code itself; and what may be missing there.

Whoever starts the groups of a run must not open the GPU itself, so it asks a process of its own:

    python -m benchmarks.gpu_environment          a line of JSON; exit code 3 and the reason where there is no GPU
    python -m benchmarks.gpu_environment --dry    the same of a CPU
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.support.commit import commit

EXIT_NO_GPU = 3
ROOT = Path(__file__).resolve().parent.parent

# (module, distribution, what it is for): what may be missing on a machine that has torch, Triton and the usual rest.
CARRY = (
    ("megatron.core", "megatron-core==0.16.1", "training and steps"),
    ("einops", "einops>=0.8", "megatron-core"),
    ("docstring_parser", "docstring-parser>=0.16", "megatron-fp8 train --keys"),
    ("torchao", "torchao==0.18.0", "the comparison with torchao"),
    (
        "transformer_engine",
        "transformer-engine[pytorch]",
        "the comparison with Transformer Engine; built, not carried",
    ),
)
VERSIONS = ("torch", "triton", "megatron-core", "torchao", "transformer-engine", "numpy")


def missing_packages() -> list[tuple[str, str, str]]:
    """The entries of CARRY that are not installed."""
    return [entry for entry in CARRY if not installed(entry[0])]


def installed(module: str) -> bool:
    """Whether a module would be found; its packages are imported, itself is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def source_digest() -> str:
    """12 digits of the sha256 of the package's and the benchmarks' Python files: which code gave a result."""
    found = hashlib.sha256()
    for folder in ("megatron_fp8", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def environment(dry: bool) -> dict[str, Any]:
    """Date, device, versions, commit, digest of the code, and the GPU's power state. Opens the GPU."""
    import torch

    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    record = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": "CPU (dry run)" if dry else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "versions": found | {"torch": torch.__version__},
        "commit": commit() or "unknown",
        "source": source_digest(),
        "dry": dry,
    }
    if not dry:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
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
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
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
    return f"{where}, commit {record['commit']} ({record['source']}), {record['date']}" + (
        f"; {state}" if state else ""
    )


def main() -> int:
    """Print the record; 3 and the reason where there is no GPU whose FP8 units can be used."""
    from benchmarks.gpu_common import open_machine

    dry = "--dry" in sys.argv[1:]
    open_machine(dry)
    print(json.dumps(environment(dry)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

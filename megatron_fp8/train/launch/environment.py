"""Rank, world size and addresses of this process, from environment variables.

The same command runs alone, under `torchrun` and under SLURM's `srun`. Each sets its own variables.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

ALONE = "to run alone, unset these variables"
_DEFAULT_PORT = 29500


_TENSOR, _CONTEXT = "model.tensor_model_parallel_size", "model.context_parallel_size"
_BLACKWELL = (10, 0)


def order_collectives(arguments: list[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set CUDA_DEVICE_MAX_CONNECTIONS=1 if the run needs it and it is not set. CUDA reads it when it starts.

    With one queue a collective starts before the GEMM that overlaps it, which tensor and context parallelism rely on.
    Megatron-LM asks for it in the same cases. All else, such as the overlapped reduction of gradients, gains from
    several queues.

    Args:
        arguments: those of `train`. Where they are refused later, the variable is set.
    """
    from ..config.options import text_of_options  # loads torch

    capability = gpu_capability()
    if capability is not None and capability >= _BLACKWELL:
        return
    try:
        sizes = text_of_options(arguments, (_TENSOR, _CONTEXT))
    except ValueError:
        sizes = {_TENSOR: "unknown"}
    if any(str(size) != "1" for size in sizes.values()):
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def gpu_capability() -> tuple[int, int] | None:
    """The first GPU's compute capability by NVIDIA's management library, which does not start CUDA; None without it."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))
        or library.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if failed else (major.value, minor.value)


@dataclass(frozen=True)
class Launch:
    """How this process was launched, its rank, and where rank 0 listens."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = _DEFAULT_PORT
    barrier: Any = field(default=None, compare=False, repr=False)
    """The `StartupBarrier` of the ranks; None before `parallel.connect`."""
    variables: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The environment variables used, which may be left over from another launch: 'RANK=0', 'WORLD_SIZE=2'."""


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Read the `Launch` from torchrun's variables, else from SLURM's, else return one process.

    Raises ValueError that names a variable which is missing or not a number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        local_rank = _number(environ, "LOCAL_RANK", 0)
        launch = Launch(
            "torchrun",
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=local_rank,
            # Only torchrun sets LOCAL_WORLD_SIZE. Without it this is a lower bound.
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", max(local_rank, 0) + 1),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT", _DEFAULT_PORT),
            variables=_variables(environ, "RANK", "WORLD_SIZE"),
        )
    elif "SLURM_PROCID" in environ:
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        launch = Launch(
            "SLURM",
            rank=_number(environ, "SLURM_PROCID"),
            world_size=_number(environ, size),
            local_rank=_number(environ, "SLURM_LOCALID", 0),
            local_world_size=_slurm_local_size(environ),
            master_addr=environ.get("MASTER_ADDR") or _slurm_first_host(environ),
            master_port=_number(environ, "MASTER_PORT", _slurm_port(environ)),
            variables=_variables(environ, "SLURM_PROCID", size),
        )
    else:
        present = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
        if present:
            missing = " and no ".join(name for name in ("RANK", "WORLD_SIZE") if name not in environ)
            values = ", ".join(f"{name}={environ[name]!r}" for name in present)
            raise ValueError(
                f"the environment has {values} and no {missing}: launch with torchrun or srun,"
                f" or unset {' and '.join(present)} to run alone."
            )
        return Launch("one process")
    if not 0 <= launch.rank < launch.world_size:
        raise ValueError(
            f"the environment has {', '.join(launch.variables)}, rank {launch.rank} of {launch.world_size} processes:"
            f" ranks go from 0 up and are fewer than the processes. Check the launch line; {ALONE}."
        )
    if not 0 <= launch.local_rank < launch.local_world_size:
        local = _variables(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID")
        raise ValueError(
            f"the environment has {', '.join((*launch.variables, *local))}, local rank"
            f" {launch.local_rank} of {launch.local_world_size} processes on this node: local ranks go from 0 up and are"
            f" fewer than the processes. Check the launch line; {ALONE}."
        )
    if not 0 < launch.master_port < 2**16:
        raise ValueError(f"MASTER_PORT={launch.master_port} must be from 1 to 65535.")
    if launch.world_size > 1 and not is_host(launch.master_addr):
        raise ValueError(
            f"MASTER_ADDR={launch.master_addr[:256]!r} is no host's name: give the name or address of rank 0's node."
        )
    return launch


def is_host(text: str) -> bool:
    """Whether a name server accepts it: not empty, no blanks, no label that is empty or too long."""
    if not text or not text.isprintable() or " " in text or "/" in text:
        return False
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name, default)
    if value is None:
        raise ValueError(f"the environment variable {name} is missing: launch with torchrun or srun.")
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"the environment variable {name}={value!r} is not a number: launch with torchrun or srun, or unset it."
        ) from None


def _variables(environ: Mapping[str, str], *names: str) -> tuple[str, ...]:
    return tuple(f"{name}={environ[name][:64]}" for name in names if name in environ)


def _slurm_local_size(environ: Mapping[str, str]) -> int:
    """Number of tasks on this node, from SLURM's list: '2(x3),1' means three nodes of two tasks and one node of one.

    The result covers at least this task's own SLURM_LOCALID: in a heterogeneous step the list may belong to another
    component.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    counts: list[int] = []
    node = _number(environ, "SLURM_NODEID", 0)
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * min(int(times or 1), 1 << 20)
    tasks = counts[node] if node < len(counts) else max(counts, default=1)
    return max(tasks, _number(environ, "SLURM_LOCALID", 0) + 1)


def _slurm_first_host(environ: Mapping[str, str]) -> str:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environ[name] for name in names if environ.get(name)), "")
    if not nodes:
        return "127.0.0.1"
    if "[" not in nodes:
        return nodes.split(",")[0]
    try:
        listing = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"the first host of SLURM's node list {nodes!r} is not known: `scontrol show hostnames` failed "
            f"({error}). Set MASTER_ADDR."
        ) from error
    return listing.stdout.split()[0]


def _slurm_port(environ: Mapping[str, str]) -> int:
    """A port from SLURM_JOB_ID, so that two jobs on one machine use different ports."""
    return 10000 + int(re.sub(r"\D", "", environ.get("SLURM_JOB_ID", "")) or 0) % 20000

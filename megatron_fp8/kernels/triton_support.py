"""A check that Triton can run a kernel here, once a process.

Triton needs more than its own package: a C compiler and Python's headers, for the part that talks to CUDA's driver, and a
folder that it can write to. Where one is missing the first kernel would end a training in a traceback.
"""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.util import find_spec

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .compiler_cache import TRITON, settle_triton


@cache
def refusal(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a CUDA device, None if they can. The first call launches one."""
    if vars(torch.version).get("hip"):
        return "its kernels are written for NVIDIA GPUs"
    if find_spec("triton") is None:
        return "its kernels are written in Triton, which is not installed: pip install megatron_fp8[gpu]"
    settle_triton()
    try:
        _launch(device)
    except Exception as error:  # the compiler's, the driver's, the disk's: each has its own
        return f"Triton cannot run a kernel here: {_why(error)}"
    return None


def _launch(device: torch.device) -> None:
    from .probe_kernel import launch  # loads Triton

    with _disable_current_modes():  # a fake tensor has no memory to write to
        launch(torch.empty(1, dtype=torch.int32, device=device))


def _why(error: Exception) -> str:
    """One line, with the remedy where it is known."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, OSError):
        return f"{said}. Set {TRITON} to a folder that can be written"
    if isinstance(error, subprocess.CalledProcessError) or "C compiler" in said:
        return f"{said}. Install gcc and Python's headers (on Debian gcc and python3-dev), or set CC to a compiler"
    return said

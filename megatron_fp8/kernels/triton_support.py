"""A check that Triton can run a kernel here; private cache folders for compilers.

Triton needs a C compiler and Python's headers, for its interface to CUDA's driver, and a writable folder. If one is
missing, the first kernel would end a training with a traceback.

The compilers of Triton and torch load and run code from a cache folder, so only this user may be able to write to it.
torch's default is ``torchinductor_NAME`` under the system's temporary folder; torch does not check an existing folder,
so another user who creates it first can have code run.

A folder named in the environment is the user's choice and is not checked.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, MutableMapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..files.terminal import warn_user
from .cpu.library import folders, private_folder


@cache
def refusal(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a CUDA device; None if they can. The first call launches one."""
    if vars(torch.version).get("hip"):
        return "its kernels are written for NVIDIA GPUs"
    if find_spec("triton") is None:
        return "its kernels are written in Triton, which is not installed: pip install megatron_fp8[gpu]"
    settle_triton()
    try:
        _launch(device)
    except Exception as error:  # the compiler, the driver and the disk raise different errors
        return f"Triton cannot run a kernel here: {_why(error)}"
    return None


def _launch(device: torch.device) -> None:
    from .gemm_layouts import transpose  # loads Triton

    with _disable_current_modes():  # a fake tensor has no memory to write to
        transpose(torch.empty(128, 128, dtype=torch.uint8, device=device))


def _why(error: Exception) -> str:
    """The error in one line, with the remedy if known."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    if isinstance(error, OSError):
        return f"{said}. Set {TRITON} to a folder that can be written"
    if isinstance(error, subprocess.CalledProcessError) or "C compiler" in said:
        return f"{said}. Install gcc and Python's headers (on Debian gcc and python3-dev), or set CC to a compiler"
    return said


TRITON, INDUCTOR = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


def settle_triton(environ: MutableMapping[str, str] = os.environ) -> None:
    """Give Triton a private cache folder: its default if that is safe, else another one with a warning."""
    home = environ.get("TRITON_HOME")
    _settle(environ, TRITON, "Triton", lambda: Path(home or Path.home(), ".triton", "cache"))


def settle_inductor(environ: MutableMapping[str, str] = os.environ) -> None:
    """``settle_triton`` for torch.compile. Call it before anything is compiled."""
    _settle(environ, INDUCTOR, "torch", lambda: Path(tempfile.gettempdir(), f"torchinductor_{_user()}"))


def _settle(environ: MutableMapping[str, str], name: str, whose: str, default: Callable[[], Path]) -> None:
    if environ.get(name):
        return
    try:
        why, folder = private_folder(default())
        if why is None and not _writable(folder):
            why = f"{folder} cannot be written"
    except (
        OSError,
        RuntimeError,
    ) as error:  # a read-only disk, or no HOME and a user unknown to the system
        why = f"its own folder cannot be made ({error})"
    if why is None:
        return
    chosen = next(folder for folder in folders() if _writable(folder)) / whose.lower()
    environ[name] = str(chosen)
    warn_user(f"{whose} keeps its kernels in {chosen}: {why}; set {name} for another folder")


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _user() -> str:
    """The user's name as torch writes it in its folder name."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        name = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    return re.sub(r'[\\/:*?"<>|]', "_", name)

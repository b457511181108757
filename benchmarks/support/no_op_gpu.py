"""A GPU on which everything is free: the native backend on CPU tensors, for the time that the host takes.

Real are torch's bindings, dispatcher, autograd and allocations (small ones, in the processor's memory), this package, and
Triton from the launch of a kernel through its specialised arguments and its launcher in C. Free are NVIDIA's driver (a
library of empty functions), and matrix products, FP8 or not, which allocate their result. What the driver, cuBLASLt's
heuristics and CUDA's allocator would take comes on top of every contender alike, for each of its launches.

It changes the process for good: start one for it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent.parent / "free_gpu"
ARCHITECTURE = 90


def install(folder: Path | None = None) -> ctypes.CDLL:
    """Put it in place of the GPU. The driver is returned: ``free_gpu_launches()`` counts.

    Args:
        folder: where what is compiled is kept, Triton's cache too; None: the temporary folder of the system.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"free_gpu_{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    os.environ.pop("TRITON_INTERPRET", None)
    driver = _built(folder / "libcuda.so.1", "driver.c", ["gcc", "-O2", "-Wl,-soname,libcuda.so.1"])
    library = ctypes.CDLL(str(driver), mode=ctypes.RTLD_GLOBAL)
    library.free_gpu_launches.restype = ctypes.c_ulong
    torch.ops.load_library(_built(folder / "products.so", "products.cpp", _with_torch()))
    _run_triton_on_it()
    _run_native_on_it()
    return library


def _built(target: Path, source: str, command: list[str]) -> Path:
    path = SOURCES / source
    if not target.exists() or target.stat().st_mtime < path.stat().st_mtime:
        subprocess.run([*command, "-shared", "-fPIC", "-w", str(path), "-o", str(target)], check=True)
    return target


def _with_torch() -> list[str]:
    from torch.utils.cpp_extension import include_paths, library_paths

    include = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [f"-L{path}" for path in library_paths()]
    linked = [*libraries, "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch"]
    return ["g++", "-O1", "-std=c++20", *include, *linked]


def _run_triton_on_it() -> None:
    """Triton's own driver for NVIDIA GPUs, with what a torch without CUDA lacks."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    first = int  # as cheap as the C function that returns the current device

    def current_device() -> int:
        torch.cuda.is_initialized()  # as torch.cuda.current_device asks
        return first()

    class Driver(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = current_device
            self.get_current_stream = int
            self.get_device_capability = lambda device: divmod(ARCHITECTURE, 10)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", ARCHITECTURE, 32)

    driver.set_active(Driver())


def _run_native_on_it() -> None:
    from megatron_fp8 import kernels
    from megatron_fp8.backends.native import backend, placement, probe

    def everything(device: torch.device) -> None:
        """No reason against it."""

    def runs(device: torch.device) -> bool:
        return True

    def none_tried(request: Any, device: torch.device, run: Any) -> None:
        """No product is refused."""

    backend.device_reason = probe.device_reason = everything
    probe._try = none_tried  # products are not computed here, so nobody can look whether they are right
    kernels.run_on = runs
    placement.has_kernels = lambda codes: True

"""Kernels: C for CPUs (cpu/), Triton for NVIDIA GPUs (all other files)."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from .triton_support import refusal

P = ParamSpec("P")
Result = TypeVar("Result")


def run_on(device: torch.device) -> bool:
    """Whether Triton kernels run on this device: an NVIDIA GPU on which Triton can compile and launch.

    False under torch.compile, which generates its own kernels. Quantization kernels also need compute capability 8.9;
    the native backend checks that.
    """
    return device.type == "cuda" and not torch.compiler.is_compiling() and refusal(device) is None


def on_its_device(launches: Callable[P, Result]) -> Callable[P, Result]:
    """Decorator: launch Triton kernels on the device of the first argument, a tensor or a TileSource.

    Triton launches on the current device and its stream; a model's layers may be on several GPUs.
    """

    @wraps(launches)
    def launched(*args: P.args, **kwargs: P.kwargs) -> Result:
        first: Any = args[0]
        with torch.cuda.device_of(first if isinstance(first, torch.Tensor) else first.inputs[0]):
            return launches(*args, **kwargs)

    return launched


def refusals() -> tuple[type[Exception], ...]:
    """The exceptions of torch for an unsupported product and of Triton for a kernel that does not compile or fit."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return RuntimeError, ValueError
    return RuntimeError, ValueError, TritonError

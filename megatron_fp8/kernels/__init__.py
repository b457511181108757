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
    """Whether Triton kernels run on tensors of this device: an NVIDIA GPU, where Triton can compile and launch.

    False in code that torch.compile traces: it generates its own kernels. Kernels that make codes also need compute
    capability 8.9, which the native backend checks.
    """
    return device.type == "cuda" and not torch.compiler.is_compiling() and refusal(device) is None


def on_its_device(launches: Callable[P, Result]) -> Callable[P, Result]:
    """A function that launches Triton kernels, on the device of its first argument, a tensor or a TileSource.

    Triton launches on the current device and its stream, and a model's layers may be spread over GPUs.
    """

    @wraps(launches)
    def launched(*args: P.args, **kwargs: P.kwargs) -> Result:
        first: Any = args[0]
        with torch.cuda.device_of(first if isinstance(first, torch.Tensor) else first.inputs[0]):
            return launches(*args, **kwargs)

    return launched


def refusals() -> tuple[type[Exception], ...]:
    """What torch raises for a product that it does not have, and Triton for a kernel that does not compile or fit."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return RuntimeError, ValueError
    return RuntimeError, ValueError, TritonError

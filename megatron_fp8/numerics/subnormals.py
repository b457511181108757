"""Subnormal numbers count, whatever the calling thread's floating-point mode.

``torch.set_flush_denormal(True)``, and a library that was compiled with -ffast-math in a process that loads it, make a
thread's arithmetic take subnormal numbers for zeros. Codes and scales are defined with them: tiny tensors have subnormal
amaxes, and the inverse of a large scale is subnormal.

torch's elementwise operations on small tensors run on the calling thread; those on large ones use threads that were
started with the mode of whoever was first. The compiled kernels, which take large tensors, see to their own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")

_SMALLEST_NORMAL = 2.0**-1022


def flushed() -> bool:
    """Whether arithmetic on this thread takes subnormal numbers, as operands or results, for zeros."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def keeping_subnormals(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function, with subnormal numbers kept on the calling thread while it runs."""

    @wraps(function)
    def keeps(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling() or not flushed():
            return function(*args, **kwargs)
        torch.set_flush_denormal(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(True)

    return keeps

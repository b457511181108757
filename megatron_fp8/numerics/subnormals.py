"""Preserves subnormal numbers, whatever the calling thread's floating-point mode.

``torch.set_flush_denormal(True)``, and libraries compiled with -ffast-math, make a thread's arithmetic treat
subnormal numbers as zeros. Codes and scales need them: tiny tensors have subnormal amaxes, and the inverse of a large
scale is subnormal.

torch's elementwise operations on small tensors run on the calling thread. Those on large tensors run on threads that
keep the mode with which they were started; the compiled kernels, which process large tensors, set the mode of their
own threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Result = TypeVar("Result")

_SMALLEST_NORMAL = 2.0**-1022


def flushes_subnormals() -> bool:
    """Whether this thread's arithmetic treats subnormal operands or results as zeros."""
    return _SMALLEST_NORMAL * 0.5 == 0.0


def keep_subnormals(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorator: the function runs without flushing of subnormal numbers on the calling thread."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling() or not flushes_subnormals():
            return function(*args, **kwargs)
        torch.set_flush_denormal(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(True)

    return wrapped

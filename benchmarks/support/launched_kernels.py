"""Which Triton kernels are launched, compiled or interpreted, and what they read."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime.interpreter import interpreter_builder

from megatron_fp8.kernels import launch_cache
from megatron_fp8.kernels.device_math import _probe


@contextmanager
def launched() -> Iterator[Counter[str]]:
    """Counts launches by kernel; with the source's kind where it computes what it reads: 'cast_tensor of norm'."""
    counts: Counter[str] = Counter()
    kernel = type(_probe)
    original, cached = kernel.run, launch_cache._LaunchCache.launch
    counted = False

    def count(fn: Any, arguments: dict[str, Any]) -> None:
        source = arguments.get("SOURCE", "plain")
        counts[fn.__name__ + ("" if source == "plain" else f" of {source}")] += 1

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (kwargs.get("warmup") or counted):
            count(self.fn, kwargs)
        return original(self, *args, **kwargs)

    def again(self: Any, grid: Any, arguments: dict[str, Any]) -> None:
        nonlocal counted
        count(self._kernel.fn, arguments)
        counted = True
        try:
            cached(self, grid, arguments)
        finally:
            counted = False

    with mock.patch.object(kernel, "run", run), mock.patch.object(launch_cache._LaunchCache, "launch", again):
        yield counts


def unchecked() -> Any:
    """The interpreter without its checks of integer overflow, which the kernels' own tests leave on: half of the time."""
    options = dataclasses.replace(interpreter_builder.options, sanitize_overflow=False)
    return mock.patch.object(interpreter_builder, "options", options)

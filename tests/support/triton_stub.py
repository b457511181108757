"""In place of Triton's driver and compiler: records what would be compiled and started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton

from megatron_fp8.kernels import launch_cache

STREAM = 7


class Compiled:
    """What Triton compiled; records what it is started with."""

    def __init__(self, started: Callable[[Compiled], None]) -> None:
        self.starts: list[tuple[Any, ...]] = []
        self.started = started

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*arguments: Any, stream: int) -> None:
            self.starts.append((grid, stream, *arguments))
            self.started(self)

        return start


class SimulatedSite:
    """``made``: what was compiled; ``last``: the number of what was compiled or started last."""

    def __init__(self) -> None:
        self.made: list[Compiled] = []
        self.last = -1
        self.active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: STREAM)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **arguments: Any) -> Compiled:
        assert not args and not warmup
        self.last = len(self.made)
        self.made.append(Compiled(self._started))
        return self.made[-1]

    def _started(self, compiled: Compiled) -> None:
        self.last = self.made.index(compiled)


@contextmanager
def in_place_of_triton() -> Iterator[SimulatedSite]:
    """Inside, launches of compiled kernels come here."""
    stand_in = SimulatedSite()

    def run(kernel: Any, *args: Any, **arguments: Any) -> Compiled:
        return stand_in.run(kernel, *args, **arguments)

    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(launch_cache, "driver", stand_in),
        mock.patch.dict(launch_cache._caches, clear=True),
    ):
        yield stand_in

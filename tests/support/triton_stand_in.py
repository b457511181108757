"""In place of Triton's driver and compiler: what would be compiled and started, noted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import triton

from megatron_fp8.kernels import bound, launch

STREAM = 7


class Compiled:
    """What Triton compiled: notes what it is started with."""

    def __init__(self, kernel: Any, started: Callable[[Compiled, tuple[Any, ...]], None]) -> None:
        self.kernel = kernel
        self.starts: list[tuple[Any, ...]] = []
        self.started = started
        self.function, self.packed_metadata = object(), object()
        self.described = 0

    def run(self, *given: Any) -> None:
        """As the launcher: sizes of the grid, a stream, the code, its options, three of hooks, arguments."""
        grid, (stream, function, packed, *hooks), arguments = given[:3], given[3:9], given[9:]
        assert function is self.function and packed is self.packed_metadata and hooks == [None] * 3
        self._start(grid, stream, arguments)

    def _start(self, grid: tuple[int, ...], stream: int, arguments: tuple[Any, ...]) -> None:
        self.starts.append((grid, stream, *arguments))
        self.started(self, self.starts[-1])

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def start(*arguments: Any, stream: int) -> None:
            self.described += 1
            self._start(grid, stream, arguments)

        return start


class StandIn:
    """``made``: what was compiled; ``last``: the number of what was compiled or started last; ``order``: each start, with
    what was started."""

    def __init__(self) -> None:
        self.made: list[Compiled] = []
        self.last = -1
        self.order: list[tuple[Compiled, tuple[Any, ...]]] = []
        self.watch: Callable[[Compiled, tuple[Any, ...]], None] = lambda compiled, start: None
        self.active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: STREAM)

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **arguments: Any) -> Compiled:
        assert not args and not warmup
        self.last = len(self.made)
        self.made.append(Compiled(kernel, self._note))
        return self.made[-1]

    def _note(self, compiled: Compiled, start: tuple[Any, ...]) -> None:
        self.last = self.made.index(compiled)
        self.order.append((compiled, start))
        self.watch(compiled, start)


@contextmanager
def in_place_of_triton() -> Iterator[StandIn]:
    """Inside, launches of compiled kernels come here."""
    stand_in = StandIn()

    def run(kernel: Any, *args: Any, **arguments: Any) -> Compiled:
        return stand_in.run(kernel, *args, **arguments)

    with (
        mock.patch.object(triton.JITFunction, "run", run),
        mock.patch.object(launch, "driver", stand_in),
        mock.patch.object(bound, "driver", stand_in),
        mock.patch.dict(launch._known, clear=True),
    ):
        yield stand_in

"""Launches of Triton kernels through a cache of compiled kernels.

Triton's own launch binds arguments by name, asks of each what the code is specialised on, makes texts of the options, and
compares every global constant of the kernel's source with what it was: 100 us of a core for the 26 arguments of a cast,
more than a GPU takes for a small one. Here the key is made of the same facts, read faster:

    a tensor       its dtype, and whether it lies on 16 bytes
    a number       its type; of an int whether it is 1, a multiple of 16, or beyond 32 bits: Triton's specialisation
    the rest       its value: constants of the kernel's code, and options such as num_warps

The first launch of a key is Triton's, which compiles; later ones start what it compiled, with pointers in place of
tensors. Hooks of the launcher (profilers) are called as ever. Kernels that are interpreted, or have hooks of their own
that come before a launch, go through Triton each time.

Rejected: kernels written in C and loaded by ourselves: Triton's launcher is C already.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """``kernel[grid](**arguments)`` on the device of the first tensor and its current stream; codes are bytes there."""
    if not isinstance(kernel, triton.JITFunction) or kernel.pre_run_hooks:
        _by_triton(kernel, grid, arguments)
        return
    cache = _caches.get(id(kernel))
    if cache is None:
        cache = _caches[id(kernel)] = _LaunchCache(kernel)
    cache.launch(grid, arguments)


class _LaunchCache:
    """What Triton compiled of one kernel.

    Args:
        kernel: a triton.JITFunction. A reference is held, so that its id stays its own.
    """

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._orders: dict[tuple[str, ...], _Order] = {}

    def launch(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Start what is compiled for such arguments; the first time let Triton compile and start it."""
        names, values, device = tuple(arguments), list(arguments.values()), -1
        if (order := self._orders.get(names)) is None:
            order = self._orders[names] = _Order.of(self._kernel, names)
        key = [names, order.constants(values)]
        for index in order.varying:
            value = values[index]
            kind: Any = type(value)
            if kind is int:
                kind = 1 if value == 1 else (value % 16 == 0, -(1 << 31) <= value < 1 << 31)
            elif value is not None and kind is not float:
                device = value.get_device()
                values[index] = pointer = value.data_ptr()
                kind = value.dtype, pointer % 16 == 0
            key.append(kind)
        key.append(device)
        if (compiled := self._compiled.get(tuple(key))) is None:
            compiled = _by_triton(self._kernel, grid, arguments)
            if compiled is not None:  # None: a hook of the compiler's had it compile and launch nothing
                self._compiled[tuple(key)] = compiled
            return
        active, start = driver.active, compiled[(*grid, 1, 1)[:3]]
        if active.get_current_device() != device >= 0:
            with torch.cuda.device(device):
                start(*order.signature(values), stream=active.get_current_stream(device))
        else:
            start(*order.signature(values), stream=active.get_current_stream(device))


class _Order(NamedTuple):
    """Positions of arguments in the order of a call.

    Attributes:
        constants: picks the values that are constants of the code, or options.
        varying: of the others.
        signature: puts values in the order of the kernel's signature, without the options.
    """

    constants: Callable[[list[Any]], Any]
    varying: list[int]
    signature: Callable[[list[Any]], Any]

    @staticmethod
    def of(kernel: Any, names: tuple[str, ...]) -> _Order:
        varies = {p.name for p in kernel.params if not p.is_constexpr}
        constants = [index for index, name in enumerate(names) if name not in varies]
        varying = [index for index, name in enumerate(names) if name in varies]
        # Of a single index an itemgetter gives no tuple.
        return _Order(
            itemgetter(*constants, constants[0]),
            varying,
            itemgetter(*(names.index(name) for name in kernel.arg_names)),
        )


_caches: dict[int, _LaunchCache] = {}


def _by_triton(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    """Triton's own launch, and what it compiled."""
    codes = torch.float8_e4m3fn, torch.float8_e5m2
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    as_bytes = {name: t.view(torch.uint8) for name, t in tensors.items() if t.dtype in codes}
    with torch.cuda.device_of(next(iter(tensors.values()))):
        return kernel[grid](**arguments | as_bytes)

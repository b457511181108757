"""Launches of Triton kernels through a cache of compiled kernels.

Triton's own launch binds arguments by name, computes each one's specialisation, converts options to text and compares
every global constant of the kernel's source with its earlier value: 100 us of CPU time for a cast's 26 arguments, more
than a GPU takes for a small cast. This cache builds its key from the same facts, faster:

    a tensor       its dtype, and whether its address is 16-byte aligned
    a number       its type; for an int whether it is 1, a multiple of 16, or beyond 32 bits: Triton's specialisation
    the rest       its value: compile-time constants, and options such as num_warps

Triton compiles and runs the first launch of a key; later launches start the compiled kernel, with pointers in place of
tensors. Launcher hooks (profilers) still run. Interpreted kernels and kernels with pre-run hooks go through Triton
every time.

Rejected: kernels in C with our own loader. Triton's launcher is already C.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """``kernel[grid](**arguments)`` on the first tensor's device and its current stream; passes codes as bytes."""
    if not isinstance(kernel, triton.JITFunction) or kernel.pre_run_hooks:
        _by_triton(kernel, grid, arguments)
        return
    cache = _caches.get(id(kernel))
    if cache is None:
        cache = _caches[id(kernel)] = _LaunchCache(kernel)
    cache.launch(grid, arguments)


class _LaunchCache:
    """Compiled variants of one kernel.

    Args:
        kernel: a triton.JITFunction. The reference keeps its id unique.
    """

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._orders: dict[tuple[str, ...], _Order] = {}

    def launch(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Start the variant compiled for these arguments; on a miss, Triton compiles and starts it."""
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
            if compiled is not None:  # None: a compiler hook skipped compilation and launch
                self._compiled[tuple(key)] = compiled
            return
        active, start = driver.active, compiled[(*grid, 1, 1)[:3]]
        if active.get_current_device() != device >= 0:
            with torch.cuda.device(device):
                start(*order.signature(values), stream=active.get_current_stream(device))
        else:
            start(*order.signature(values), stream=active.get_current_stream(device))


class _Order(NamedTuple):
    """Argument positions for one order of keyword names.

    Attributes:
        constants: picks compile-time constants and options.
        varying: positions of all other arguments.
        signature: reorders values to the kernel's signature, without the options.
    """

    constants: Callable[[list[Any]], Any]
    varying: list[int]
    signature: Callable[[list[Any]], Any]

    @staticmethod
    def of(kernel: Any, names: tuple[str, ...]) -> _Order:
        varies = {p.name for p in kernel.params if not p.is_constexpr}
        constants = [index for index, name in enumerate(names) if name not in varies]
        varying = [index for index, name in enumerate(names) if name in varies]
        # The index appears twice because itemgetter of one index returns no tuple.
        return _Order(
            itemgetter(*constants, constants[0]),
            varying,
            itemgetter(*(names.index(name) for name in kernel.arg_names)),
        )


_caches: dict[int, _LaunchCache] = {}


def _by_triton(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> Any:
    """Launch through Triton; returns the compiled kernel."""
    codes = torch.float8_e4m3fn, torch.float8_e5m2
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    as_bytes = {name: t.view(torch.uint8) for name, t in tensors.items() if t.dtype in codes}
    with torch.cuda.device_of(next(iter(tensors.values()))):
        return kernel[grid](**arguments | as_bytes)

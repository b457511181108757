"""Cached launches of Triton kernels, by kinds of arguments.

Triton's own way to a launch binds arguments by name, asks of each what the code is specialised on, makes texts of the
options, and compares every global constant of the kernel's source with what it was: 100 us of a core for the 26 arguments
of a cast, more than the GPU takes for a small one. Here a launch is known by the same facts, read faster:

    a tensor       its dtype, and whether it lies on 16 bytes
    a number       its type; of an int whether it is 1, a multiple of 16, or beyond 32 bits: Triton's specialisation
    the rest       its value: constants of the kernel's code, and options such as num_warps

The first launch of its kind is Triton's, which compiles; later ones start what it compiled, with pointers in place of
tensors. Hooks of the launcher (profilers) are called as ever; what describes a launch to them is made only where there
are some. Kernels that are interpreted, or have hooks of their own that come before a launch, go Triton's way each time.

What is launched again with arguments of the same shapes can be kept whole (``prepared``), with all but pointers fixed:
bound.py does, for casts. Rejected: kernels written in C and loaded by ourselves: Triton's launcher is C already.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime import driver


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """``kernel[grid](**arguments)`` on the device of the first tensor and its current stream; codes are bytes there."""
    if not isinstance(kernel, triton.JITFunction) or kernel.pre_run_hooks:
        with torch.cuda.device_of(_first_tensor(arguments)):
            kernel[grid](**_as_bytes(arguments))
        return
    _known_of(kernel).launch(grid, arguments)


class Prepared(NamedTuple):
    """A launch that was made: of which kernel, how its like is started, on which device, and its arguments in the
    signature's order."""

    kernel: Any
    start: Callable[..., None]
    device: int
    values: tuple[Any, ...]


def prepared(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> Prepared | None:
    """``launch``, and what it takes to do it again: ``start(*values, stream=)``, with pointers in place of tensors.

    Tensors elsewhere have to be such as would be compiled for alike. None: such launches go Triton's way each time.
    """
    if not isinstance(kernel, triton.JITFunction) or kernel.pre_run_hooks:
        launch(kernel, grid, **arguments)
        return None
    compiled = _known_of(kernel).launch(grid, arguments)
    if compiled is None:
        return None
    values = tuple(arguments[name] for name in kernel.arg_names)
    return Prepared(kernel, _starting(compiled, grid), _first_tensor(arguments).get_device(), values)


def _starting(compiled: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """``compiled[grid]``, which describes each launch to Triton's hooks; where there are none, it is not described."""
    width, height, depth = sizes = (*grid, 1, 1)[:3]
    described, run = compiled[sizes], compiled.run
    function, packed = compiled.function, compiled.packed_metadata
    runtime = knobs.runtime

    def start(*values: Any, stream: int) -> None:
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # A chain of hooks, which may be empty; earlier versions of Triton have one hook, or None.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            described(*values, stream=stream)
        else:
            run(width, height, depth, stream, function, packed, None, None, None, *values)

    return start


def _known_of(kernel: Any) -> _Known:
    known = _known.get(id(kernel))
    if known is None:
        known = _known[id(kernel)] = _Known(kernel)
    return known


class _Known:
    """The launches of one kernel that were met.

    Args:
        kernel: a triton.JITFunction, which is held, so that its id stays its own.
    """

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._orders: dict[tuple[str, ...], _Order] = {}

    def launch(self, grid: tuple[int, ...], arguments: dict[str, Any]) -> Any:
        """Start what is compiled for such arguments; the first time let Triton compile and start it. Returns that, None
        where it was only looked at."""
        names = tuple(arguments)
        if (order := self._orders.get(names)) is None:
            order = self._orders[names] = _Order.of(self._kernel, names)
        values = list(arguments.values())
        device = -1
        key = [names, order.constants(values)]
        for index in order.varying:
            value = values[index]
            kind: Any = type(value)
            if kind is int:
                kind = 1 if value == 1 else (value % 16 == 0, -(1 << 31) <= value < 1 << 31)
            elif value is not None and kind is not float:
                device = value.get_device()
                values[index] = pointer = value.data_ptr()
                kind = (value.dtype, pointer % 16 == 0)
            key.append(kind)
        key.append(device)
        if (compiled := self._compiled.get(tuple(key))) is None:
            with torch.cuda.device_of(_first_tensor(arguments)):
                compiled = self._kernel[grid](**_as_bytes(arguments))
            if compiled is not None:  # else it was only looked at
                self._compiled[tuple(key)] = compiled
            return compiled
        active, start = driver.active, _starting(compiled, grid)
        if active.get_current_device() != device >= 0:
            with torch.cuda.device(device):
                start(*order.signature(values), stream=active.get_current_stream(device))
        else:
            start(*order.signature(values), stream=active.get_current_stream(device))
        return compiled


class _Order(NamedTuple):
    """Of arguments in the order of a call: those that are constants of the code or options; which others there are; and
    all but the options in the order of the kernel's signature."""

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


_known: dict[int, _Known] = {}


def _first_tensor(arguments: dict[str, Any]) -> torch.Tensor:
    return next(value for value in arguments.values() if isinstance(value, torch.Tensor))


def _as_bytes(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with floats of 8 bits, which kernels know as bytes, viewed so."""
    codes = torch.float8_e4m3fn, torch.float8_e5m2
    return {
        name: value.view(torch.uint8) if isinstance(value, torch.Tensor) and value.dtype in codes else value
        for name, value in arguments.items()
    }

"""A cast that is bound to a matrix's shape: memory, launches, and no decisions.

A cast decides much (tile, grid, directions, constants, strides of scales) that is the same for every matrix of one shape,
dtype and alignment in one slot: in Python that takes longer than the launches. So a cast that comes again runs once under
a ``Tape``, which notes what it launches and with which memory. What comes of it does the same to another matrix:
allocates, puts pointers in place, starts.

Pointers are of three kinds: the matrix; memory that the cast allocates, told apart by its storage, zeroed where kernels
max or add into it; and what stays where it is (the slot in its arena, a delayed scale), which whoever keeps a bound cast
drops with it. A launch that Triton has to make by itself each time (interpreted kernels, hooks) binds nothing.

Rejected: a second, shorter way that builds the same arguments. Two places would have to agree on every stride.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime import driver

from .launch import Prepared, prepared

_ADDED_TO = {"amax", "nonfinite", "row_amax", "col_amax"}
"""Arguments that kernels max or add into: their memory begins as zeros."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""Codes and scale_inv of one side."""


class _Launch(NamedTuple):
    """values: the arguments in order; places: of which the one at (place) is pointer (index) plus (offset)."""

    start: Callable[..., None]
    values: list[Any]
    places: list[tuple[int, int, int]]


class Tape:
    """Launches, and notes it.

    Args:
        x: the matrix that is cast.
        stays: tensors that will be where they are for as long as what is bound is used.
    """

    def __init__(self, x: torch.Tensor, stays: tuple[torch.Tensor, ...]):
        self._x, self._stays = x, stays
        self._noted: list[tuple[Prepared, tuple[str, ...]]] = []
        self._bindable = x.numel() > 0

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """launch.launch."""
        made = prepared(kernel, grid, **arguments)
        if made is None or arguments["x"].data_ptr() != self._x.data_ptr():
            self._bindable = False
        else:
            self._noted.append((made, kernel.arg_names))

    def bound(self, *sides: Pair | None) -> BoundCast | None:
        """What does the same again, given the sides that came of it; None: it could not be noted."""
        if not self._bindable or not self._noted:
            return None
        return _Binding(self._x, self._stays, sides).of(self._noted)


class BoundCast:
    """What a tape gives.

    Args:
        kernels: that it launches, each once.
        device: to launch on.
        memory: allocate what is written.
        launches: in order.
        results: codes and scale_inv of each side: index of its memory, and how it lies there if not as that is.
    """

    def __init__(
        self,
        kernels: list[Any],
        device: int,
        memory: list[Callable[[], torch.Tensor]],
        launches: list[_Launch],
        results: list[tuple[int, tuple[Any, Any] | None]],
    ):
        self._kernels = kernels
        self._device, self._memory, self._launches, self._results = device, memory, launches, results

    def ready(self) -> int | None:
        """The stream to launch on; None: not from here, another device is the current one, or a kernel has hooks."""
        for kernel in self._kernels:
            if kernel.pre_run_hooks:
                return None
        active, device = driver.active, self._device
        if active.get_current_device() != device >= 0:
            return None
        stream: int = active.get_current_stream(device)
        return stream

    def __call__(self, pointer: int, stream: int) -> list[torch.Tensor]:
        """Codes and scale_inv of each side of the matrix that lies there, on a stream that ``ready`` gave."""
        made = [allocate() for allocate in self._memory]
        pointers = [pointer, *[tensor.data_ptr() for tensor in made]]
        for start, template, places in self._launches:
            values = template.copy()
            for place, index, offset in places:
                values[place] = pointers[index] + offset
            start(*values, stream=stream)
        return [
            made[index] if lies is None else made[index].as_strided(*lies) for index, lies in self._results
        ]


class _Binding:
    """Tells the memory of a tape's launches apart."""

    def __init__(self, x: torch.Tensor, stays: tuple[torch.Tensor, ...], sides: tuple[Pair | None, ...]):
        self._x, self._sides = x, sides
        self._fixed = {_address(tensor) for tensor in stays}
        self._results = {_address(t): t for side in sides if side is not None for t in side}
        self._indices: dict[int, int] = {}
        self._memory: list[Callable[[], torch.Tensor]] = []

    def of(self, noted: list[tuple[Prepared, tuple[str, ...]]]) -> BoundCast:
        launches = []
        for made, names in noted:
            values, places = list(made.values), []
            for place, value in enumerate(made.values):
                if not isinstance(value, torch.Tensor):
                    continue
                pointer = value.data_ptr()
                if pointer == self._x.data_ptr():
                    places.append((place, 0, 0))
                elif _address(value) not in self._fixed:
                    index = self._index(value, zeroed=names[place] in _ADDED_TO)
                    places.append((place, index + 1, pointer - _address(value)))
                values[place] = pointer
            launches.append(_Launch(made.start, values, places))
        kernels = {id(made.kernel): made.kernel for made, _ in noted}  # its own hash is that of its source
        results = [self._result(tensor) for side in self._sides if side is not None for tensor in side]
        return BoundCast(list(kernels.values()), noted[0][0].device, self._memory, launches, results)

    def _index(self, tensor: torch.Tensor, *, zeroed: bool) -> int:
        """Which of the allocations the tensor lies in."""
        address = _address(tensor)
        if (known := self._indices.get(address)) is not None:
            return known
        self._indices[address] = index = len(self._memory)
        size = tensor.untyped_storage().nbytes()
        result, device = self._results.get(address), tensor.device
        if zeroed:
            make = partial(torch.zeros, size // 4, dtype=torch.float32, device=device)
        elif result is None:
            make = partial(torch.empty, size, dtype=torch.uint8, device=device)
        elif result.numel() * result.element_size() == size:
            make = partial(
                torch.empty_strided, result.shape, result.stride(), dtype=result.dtype, device=device
            )
        else:  # padded
            make = partial(torch.empty, size // result.element_size(), dtype=result.dtype, device=device)
        self._memory.append(make)
        return index

    def _result(self, tensor: torch.Tensor) -> tuple[int, tuple[Any, Any] | None]:
        padded = tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes()
        return self._indices[_address(tensor)], (tensor.shape, tensor.stride()) if padded else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

"""A matrix that is computed on demand: the result of a norm or of SwiGLU.

The FP8 linear behind it computes and quantises it in one kernel.

An FP8 linear wants codes, and a kernel that makes codes can compute the norm, or SwiGLU, as it reads
(kernels/tile_loaders.TileSource). So on GPUs these return a ``LazyTensor``: a tensor to autograd and to Megatron, which
pass it on, and a TileSource to the native backend, which quantises it. The BF16 result is then never written, nor read
back.

Whoever else looks (a hook, a check for NaN, a BF16 GEMM) sees an ordinary tensor: the first operation on it writes the
values, the same bits that the codes are made of, and from then on it is what was written. Whatever a model or user
does with it is right; it only costs what an unfused norm costs.

The reader decides how to quantise: it knows the recipe, the history, the directions and the communication, and is free to
do so after a gather. The producer only has to be told to defer, by code that knows that the reader takes codes.

Rejected: one module for norm and linear, as Transformer Engine has it. The norm's parameters change their names, hooks
and recomputation of the norm alone have nothing to hold on to, and every pair of producer and reader is another module.
Rejected: a producer that returns codes. It would have to know everything the reader knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class _Cell:
    """The matrix, shared by all names of it: its TileSource until it is written, its values from then on."""

    def __init__(self, source: Any):
        self._source: Any | None = source
        self._versions = _versions(source)
        self.values: torch.Tensor | None = None

    @property
    def source(self) -> Any | None:
        """None once it is written. RuntimeError if what it reads has changed meanwhile, as autograd's saved tensors."""
        if self._source is not None and _versions(self._source) != self._versions:
            raise RuntimeError(
                f"a {self._source.kind} was left to be computed by its reader, and one of its inputs was changed in place"
                " before that: change a copy"
            )
        return self._source

    def write(self) -> torch.Tensor:
        if self.values is None:
            from .quantize import write  # loads Triton

            source: Any = self.source
            self.values, self._source = write(source), None
        return self.values


class _Rows(NamedTuple):
    """Some rows of a matrix: computed without the others by a kernel that reads them, written with all of it."""

    whole: _Cell | _Rows
    start: int
    rows: int

    @property
    def source(self) -> Any | None:
        """As of ``_Cell``."""
        source = self.whole.source
        return None if source is None else source.part(self.start, self.rows)

    def write(self) -> torch.Tensor:
        return self.whole.write().narrow(0, self.start, self.rows)


def _versions(source: Any) -> list[int]:
    """How often each input was written; tensors made in inference mode do not count."""
    return [0 if t.is_inference() else t._version for t in source.inputs]


class LazyTensor(torch.Tensor):
    """What a kernels.tile_loaders.TileSource computes, as a tensor [..., cols] of the TileSource's dtype.

    Leading dimensions are the TileSource's rows; views that keep the last dimension are other names for the same matrix,
    and what ``split`` by a list of rows makes of [rows, cols] are names for parts of it.
    Reading one after an input of it was changed in place is a RuntimeError.
    """

    _cell: _Cell | _Rows
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: Any, shape: Sequence[int]) -> LazyTensor:
        return _named(_Cell(source), shape, source.dtype, source.device)

    @property
    def source(self) -> Any | None:
        """The TileSource that computes it, None once it is written. RuntimeError if its inputs were changed in place."""
        return self._cell.source

    def written(self) -> torch.Tensor:
        """The values, an ordinary contiguous tensor; computed at the first call."""
        return self._cell.write().view(self.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as its values."""
        return self.written().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of its values."""
        return memo.setdefault(id(self), self.written().clone())

    def __repr__(self) -> str:  # type: ignore[override]
        state = "written" if self.source is None else f"of {self.source.kind}, not written"
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {self.device}, {state})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return _named(args[0]._cell, args[0].shape, args[0].dtype, args[0].device)
        if func is aten.view.default:
            x, size = args
            shape = torch.empty(x.shape, device="meta", dtype=torch.float32).view(size).shape
            if x.ndim and len(shape) and shape[-1] == x.shape[-1]:
                return _named(x._cell, shape, x.dtype, x.device)
        if func is aten.split_with_sizes.default and args[0].ndim == 2 and not any(args[2:]):  # by rows
            return _split(args[0], args[1])
        return func(*tree_map(written, args), **tree_map(written, kwargs or {}))


def _split(x: LazyTensor, counts: Sequence[int]) -> list[LazyTensor]:
    """x [rows, cols] in parts of so many rows."""
    # What is wrong with the counts, this says.
    torch.empty(x.shape, device="meta", dtype=torch.float32).split_with_sizes(counts)
    starts = accumulate(counts, initial=0)
    parts = [_Rows(x._cell, start, rows) for start, rows in zip(starts, counts, strict=False)]
    return [_named(part, (part.rows, x.shape[1]), x.dtype, x.device) for part in parts]


def _named(cell: _Cell | _Rows, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> LazyTensor:
    made: LazyTensor = torch.Tensor._make_wrapper_subclass(
        LazyTensor, tuple(shape), dtype=dtype, device=device
    )
    made._cell = cell
    return made


def written(x: Any) -> Any:
    """A LazyTensor's values; anything else as it is."""
    return x.written() if isinstance(x, LazyTensor) else x


def source_of(x: torch.Tensor) -> Any:
    """What a kernel is to read: the TileSource of a matrix that is not written, else an ordinary tensor."""
    source = x.source if isinstance(x, LazyTensor) else None
    return written(x) if source is None else source

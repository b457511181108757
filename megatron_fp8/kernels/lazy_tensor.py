"""Lazy tensor: the result of a norm or SwiGLU, computed on demand.

A quantization kernel can compute the norm or SwiGLU while it reads (kernels/tiles.TileSource). So on GPUs these
operations return a ``LazyTensor``. Autograd and Megatron pass it on as a tensor; the native backend reads its TileSource
and computes and quantizes it in one kernel. The BF16 result is then never written or read back.

Any other operation (a hook, a NaN check, a BF16 GEMM) gets an ordinary tensor: the first one computes and stores the
values, with the bits that the codes are made from. So every use is correct and costs at most what an unfused norm costs.

The consumer chooses the quantization: it knows the recipe, history, directions and communication, and may quantize after
a gather. The producer only gets a flag to defer, from code that knows that the consumer takes a TileSource.

Rejected: one module for norm and linear, as in Transformer Engine. The norm's parameters would be renamed, hooks and
recomputation of the norm alone would be impossible, and each pair of producer and consumer would need its own module.
Rejected: a producer that returns codes. It would need all the information of the consumer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class _Cell:
    """Storage shared by all views: the TileSource until it is computed, then the values [rows, cols]."""

    def __init__(self, source: Any):
        self._source: Any | None = source
        self._versions = _versions(source)
        self.values: torch.Tensor | None = None

    @property
    def source(self) -> Any | None:
        """The TileSource; None once computed. RuntimeError if an input was changed in place, as for saved tensors."""
        if self._source is not None and _versions(self._source) != self._versions:
            raise RuntimeError(
                f"a {self._source.kind} was left to be computed by its reader, and one of its inputs was changed in place"
                " before that: change a copy"
            )
        return self._source

    def write(self) -> torch.Tensor:
        if self.values is None:
            from .quantize import write_matrix  # loads Triton

            source: Any = self.source
            self.values, self._source = write_matrix(source), None
        return self.values


class _Rows(NamedTuple):
    """A row slice of a matrix. Kernels compute the slice alone; ``write`` computes the whole matrix."""

    whole: _Cell | _Rows
    start: int
    rows: int

    @property
    def source(self) -> Any | None:
        """As ``_Cell.source``."""
        source = self.whole.source
        return None if source is None else source.part(self.start, self.rows)

    def write(self) -> torch.Tensor:
        return self.whole.write().narrow(0, self.start, self.rows)


def _versions(source: Any) -> list[int]:
    """Each input's version counter; 0 for inference tensors, which have none."""
    return [0 if t.is_inference() else t._version for t in source.inputs]


class LazyTensor(torch.Tensor):
    """The matrix of a kernels.tiles.TileSource as a tensor [..., cols] of its dtype.

    Leading dimensions flatten to the TileSource's rows. Views that keep the last dimension, and ``split`` of [rows, cols]
    by a list of row counts, stay lazy. Reading it after an input was changed in place raises RuntimeError.
    """

    _cell: _Cell | _Rows
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: Any, shape: Sequence[int]) -> LazyTensor:
        return _make_lazy(_Cell(source), shape, source.dtype, source.device)

    @property
    def source(self) -> Any | None:
        """The TileSource; None once computed. RuntimeError if an input was changed in place."""
        return self._cell.source

    def materialize(self) -> torch.Tensor:
        """The values [..., cols], an ordinary contiguous tensor; the first call computes them."""
        return self._cell.write().view(self.shape)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the values."""
        return self.materialize().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies the values."""
        return memo.setdefault(id(self), self.materialize().clone())

    def __repr__(self) -> str:  # type: ignore[override]
        state = "written" if self.source is None else f"of {self.source.kind}, not written"
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {self.device}, {state})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            return _make_lazy(args[0]._cell, args[0].shape, args[0].dtype, args[0].device)
        if func is aten.view.default:
            x, size = args
            shape = torch.empty(x.shape, device="meta", dtype=torch.float32).view(size).shape
            if x.ndim and len(shape) and shape[-1] == x.shape[-1]:
                return _make_lazy(x._cell, shape, x.dtype, x.device)
        if func is aten.split_with_sizes.default and args[0].ndim == 2 and not any(args[2:]):  # by rows
            return _split(args[0], args[1])
        return func(*tree_map(materialize, args), **tree_map(materialize, kwargs or {}))


def _split(x: LazyTensor, counts: Sequence[int]) -> list[LazyTensor]:
    """x [rows, cols] split into parts of ``counts`` rows."""
    # Raises torch's own error for wrong counts.
    torch.empty(x.shape, device="meta", dtype=torch.float32).split_with_sizes(counts)
    starts = accumulate(counts, initial=0)
    parts = [_Rows(x._cell, start, rows) for start, rows in zip(starts, counts, strict=False)]
    return [_make_lazy(part, (part.rows, x.shape[1]), x.dtype, x.device) for part in parts]


def _make_lazy(
    cell: _Cell | _Rows, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> LazyTensor:
    made: LazyTensor = torch.Tensor._make_wrapper_subclass(
        LazyTensor, tuple(shape), dtype=dtype, device=device
    )
    made._cell = cell
    return made


def materialize(x: Any) -> Any:
    """A LazyTensor's values [..., cols]; anything else unchanged."""
    return x.materialize() if isinstance(x, LazyTensor) else x


def source_of(x: torch.Tensor) -> Any:
    """Kernel input for x [..., cols]: the TileSource if it is not computed yet, else an ordinary tensor."""
    source = x.source if isinstance(x, LazyTensor) else None
    return materialize(x) if source is None else source

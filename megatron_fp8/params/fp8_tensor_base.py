"""The base class of tensor subclasses that store codes: dispatch of torch's operations.

``Fp8TensorBase`` has a shape, a dtype and a device for torch, and stores codes. A subclass defines how to read the value
(``dequantize``), how to write one (``write``) and how to make another tensor over the same storage (``alias``). Then

* ``detach``, ``.data`` and a view of the whole share the storage, so a write through them changes the tensor;
* ``copy_``, indexed assignment and every in-place operation compute on the value and write the result back;
* any other operation reads the value and returns an ordinary tensor. So does a partial view: writing into it does not
  change the tensor.

Rejected: an implementation for each operation that a training framework may call. The list is never complete, and a
missing one fails in a user's run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten


class Fp8TensorBase(torch.Tensor):
    """A tensor stored as codes.

    Raises:
        TypeError: ``.data`` is set to another shape, dtype or device (a module's ``.float()``).
        RuntimeError: a collective is called on it, which would send the dequantized copy and not change the codes.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the value as an ordinary tensor, rounded once to dtype (default: its own dtype)."""
        raise AssertionError("a subclass defines dequantize()")

    def write(self, value: torch.Tensor) -> None:
        """Quantizes a tensor of this shape into the codes."""
        raise AssertionError("a subclass defines write()")

    def alias(self) -> Fp8TensorBase:
        """Returns another tensor over the same storage, outside autograd."""
        raise AssertionError("a subclass defines alias()")

    def copy_codes(self, source: torch.Tensor) -> bool:
        """Copies the codes of a tensor of the same kind; returns False if it is of another kind."""
        return False

    def move(self, device: Any) -> torch.Tensor:
        """Returns the tensor on another device."""
        return self.dequantize().to(device)

    @property
    def data(self) -> Any:
        """The same tensor outside autograd; a write to it changes this tensor."""
        return self.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise TypeError(
                f"{self!r} cannot become {value.dtype} {tuple(value.shape)} on {value.device}: convert or move the model"
                " before its weights are made FP8, or take their dequantized values"
            )
        if not self.copy_codes(value):
            self.write(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Writes elements into the value, and quantizes all of it again."""
        whole = self.dequantize()
        whole[index] = value
        self.write(whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the value as an ordinary tensor: reading the file needs no class of this package."""
        return self.dequantize().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], Fp8TensorBase):
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func.namespace == "c10d":
            raise RuntimeError(
                f"{func} on {type(args[0]).__name__} would send a dequantized copy and change nothing here: send its"
                " codes (parameter.codes), or write the received value with copy_"
            )
        return _run_on_values(func, args, kwargs)


def _alias(self: Fp8TensorBase, *_: Any, **__: Any) -> Fp8TensorBase:
    return self.alias()


def _same_shape(self: Fp8TensorBase, size: Any, **_: Any) -> Any:
    """Returns an alias for a view of the whole tensor (DistributedDataParallel expands a parameter to its own shape)."""
    shape = [own if n == -1 else n for n, own in zip(size, self.shape, strict=False)]
    return self.alias() if shape == list(self.shape) and len(size) == self.ndim else NotImplemented


def _copy(self: Fp8TensorBase, source: torch.Tensor, non_blocking: bool = False) -> Fp8TensorBase:
    if not self.copy_codes(source):
        value = source.dequantize() if isinstance(source, Fp8TensorBase) else source
        self.write(value.to(self.device).expand(self.shape))
    return self


def _to_copy(self: Fp8TensorBase, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """Another dtype: the value, rounded once from codes * scale. Another device: the same kind of tensor there."""
    if dtype not in (None, self.dtype):
        return self.dequantize(dtype).to(device or self.device)
    if device is None or torch.device(device) == self.device:
        return self.dequantize()
    return self.move(device)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.expand.default: _same_shape,
    aten.view.default: _same_shape,
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
}


def _run_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operation on dequantized values; quantizes those that it changed in place."""
    values: dict[int, torch.Tensor] = {}

    def plain(x: Any) -> Any:
        if not isinstance(x, Fp8TensorBase):
            return x
        if id(x) not in values:
            values[id(x)] = x.dequantize()
        return values[id(x)]

    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    write_targets = [
        arguments.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    tensor_of_value = {}
    for target in tree_leaves(write_targets):
        if isinstance(target, Fp8TensorBase):
            target.write(values[id(target)])
            tensor_of_value[id(values[id(target)])] = target
    return tree_map(lambda x: tensor_of_value.get(id(x), x), result) if tensor_of_value else result

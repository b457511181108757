"""The base of tensor subclasses with codes: torch's operations, in one place.

``CodedTensor`` shows a shape, a dtype and a device to torch, and keeps codes. A subclass says how to get the value
(``dequantize``), how to take one (``write``) and how to make another name for the same storage (``alias``). From that

* ``detach``, ``.data`` and a view of the whole are the same storage, so that a write through them arrives;
* ``copy_``, indexed assignment and every operation in place compute on the value and write the result back;
* any other operation sees the value and gives an ordinary tensor. A partial view is such a result: writing into one
  changes nothing here.

Rejected: an implementation for each operation that a training framework may call. The list is never complete, and what is
missing from it fails in a user's run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten


class CodedTensor(torch.Tensor):
    """A tensor whose memory is codes.

    Raises:
        TypeError: ``.data`` is given something of another shape, dtype or device (a module's ``.float()``).
        RuntimeError: a collective is called on it: it would move the dequantised copy and leave the codes.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The value as an ordinary tensor, rounded once to dtype (default: the one it shows)."""
        raise AssertionError("a subclass defines dequantize()")

    def write(self, value: torch.Tensor) -> None:
        """Quantise a tensor of this shape into the codes."""
        raise AssertionError("a subclass defines write()")

    def alias(self) -> CodedTensor:
        """Another tensor over the same storage, outside autograd."""
        raise AssertionError("a subclass defines alias()")

    def copy_codes(self, source: torch.Tensor) -> bool:
        """Take over the codes of a tensor that has the same kind of them; False if it has not."""
        return False

    def move(self, device: Any) -> torch.Tensor:
        """The tensor on another device."""
        return self.dequantize().to(device)

    @property
    def data(self) -> Any:
        """The same tensor outside autograd: a write reaches it."""
        return self.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
            raise TypeError(
                f"{self!r} cannot become {value.dtype} {tuple(value.shape)} on {value.device}: convert or move the model"
                " before its weights are made FP8, or take their dequantised values"
            )
        if not self.copy_codes(value):
            self.write(value)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write elements into the value, and quantise the whole again."""
        whole = self.dequantize()
        whole[index] = value
        self.write(whole)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as its value: a file needs no class of this package to be read."""
        return self.dequantize().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None and isinstance(args[0], CodedTensor):
            done = special(*args, **kwargs)
            if done is not NotImplemented:
                return done
        if func.namespace == "c10d":
            raise RuntimeError(
                f"{func} on {type(args[0]).__name__} would send a dequantised copy and change nothing here: send its"
                " codes (parameter.codes), or write the received value with copy_"
            )
        return _on_values(func, args, kwargs)


def _alias(self: CodedTensor, *_: Any, **__: Any) -> CodedTensor:
    return self.alias()


def _same_shape(self: CodedTensor, size: Any, **_: Any) -> Any:
    """A view of the whole (DistributedDataParallel expands a parameter to its own shape): no copy."""
    wanted = [own if n == -1 else n for n, own in zip(size, self.shape, strict=False)]
    return self.alias() if wanted == list(self.shape) and len(size) == self.ndim else NotImplemented


def _copy(self: CodedTensor, source: torch.Tensor, non_blocking: bool = False) -> CodedTensor:
    if not self.copy_codes(source):
        value = source.dequantize() if isinstance(source, CodedTensor) else source
        self.write(value.to(self.device).expand(self.shape))
    return self


def _to_copy(self: CodedTensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
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


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on dequantised values; what it writes in place is quantised back."""
    values: dict[int, torch.Tensor] = {}

    def plain(x: Any) -> Any:
        if not isinstance(x, CodedTensor):
            return x
        if id(x) not in values:
            values[id(x)] = x.dequantize()
        return values[id(x)]

    result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = [
        given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    back = {}
    for target in tree_leaves(written):
        if isinstance(target, CodedTensor):
            target.write(values[id(target)])
            back[id(values[id(target)])] = target
    return tree_map(lambda x: back.get(id(x), x), result) if back else result

"""Triton's interpreter without the three quarters of its time that nothing comes of.

Whenever a jitted function is called, by a launch or by another one, it goes through all names of triton.language and
puts its own functions in place of the builtins. A launch puts back what it replaced; calls inside it find everything
replaced already. And it computes every integer sum and product again, in 64 bits, to see whether they overflow, then
drops the answer unless it debugs.

Of what is left, numpy's part is small: tiles are. Each operation makes the types of its operands and of its result anew,
each of them walks through its shape several times, and each lookup of numpy's dtype makes a dictionary of all of them.
Here shapes, and the dtypes of types, are kept from the first time they are needed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache  # once a process
def lean_interpreter() -> None:
    """From now on, in this process. A launch searches once, where Triton puts back what it replaces (not 3.4)."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
        interpreter._patch_attr = _patch_attr
    if hasattr(tl, "tuple"):  # not 3.4, where shapes are tuples of Python's
        _keep_shapes()
        _keep_dtypes()


def _once_a_launch(replace: Callable[[Any], Any]) -> Callable[[Any], Any]:
    replaced: set[str] = set()

    def replace_once(function: Any) -> Any:
        names = _languages(function)
        if replaced and names <= replaced:
            return None  # a call inside a launch: nobody asks for a scope
        scope = replace(function)
        if not replaced:  # a launch
            restore = scope.restore
            scope.restore = lambda: (restore(), replaced.clear())
        replaced.update(names)
        return scope

    return replace_once


@functools.cache
def _languages(function: Any) -> frozenset[str]:
    """Which of the two modules with builtins a function's module knows."""
    known = function.__globals__.values()
    return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in known))


# ------------------------------------------------------------------------------------------ what each operation calls


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A builtin with the interpreter's semantic, without the wrapper that only looks whether there is one."""
    function = getattr(member, "__wrapped__", member)

    def builtin(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, builtin)


@functools.cache
def _tensor_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Of a tensor of these sizes: its shape, whose elements are constexpr, and how many elements it has."""
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _keep_shapes() -> None:
    """Types and tensors of one shape share what depends on the shape alone, and what nobody changes."""
    block_type, make, to_ir = tl.block_type, tl.block_type.__init__, tl.block_type.to_ir

    @functools.cache
    def shaped(sizes: tuple[int, ...]) -> tuple[Any, int, str]:
        block = block_type.__new__(block_type)
        make(block, tl.int1, list(sizes))
        return block.shape, block.numel, str(block.shape)

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape.values if type(shape) is tl.tuple else shape)
        if any(type(size) is not int for size in sizes):
            make(self, element_ty, shape)
        else:
            self.element_ty = element_ty
            self.shape, self.numel, text = shaped(sizes)
            self.name = f"<{text}, {element_ty}>"

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = _tensor_shape(tuple(type.shape.values) if type.is_block() else ())

    def to_itself(self: Any, builder: Any) -> Any:
        """The interpreter's own type is an equal one."""
        return self if builder is interpreter.interpreter_builder else to_ir(self, builder)

    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_unlike(a: Any, b: Any) -> tuple[Any, Any]:
        alike = a.type.is_block() and b.type.is_block() and a.type.shape is b.type.shape
        return (a, b) if alike else broadcast(a, b)

    tl.block_type.__init__, tl.block_type.to_ir, tl.tensor.__init__ = make_block, to_itself, make_tensor
    semantic.broadcast_impl_value = broadcast_unlike


def _keep_dtypes() -> None:
    """numpy's dtype of Triton's types; pointers cannot be hashed."""
    find = interpreter._get_np_dtype
    kept = functools.cache(find)

    def numpy_dtype(type: Any) -> Any:
        scalar = type.scalar
        return find(scalar) if isinstance(scalar, tl.pointer_type) else kept(scalar)

    interpreter._get_np_dtype = numpy_dtype

"""Triton's interpreter without the two thirds of its time that nothing comes of.

Whenever a jitted function is called, by a launch or by another one, it goes through all names of triton.language and
puts its own functions in place of the builtins. A launch puts back what it replaced; calls inside it find everything
replaced already. And it computes every integer sum and product again, in 64 bits, to see whether they overflow, then
drops the answer unless it debugs.
"""

from __future__ import annotations

import dataclasses
import functools
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

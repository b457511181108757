"""Imports Megatron-Core without torch.compile, on machines that do not use it.

Megatron-Core decorates some fifty functions with torch.compile. Decorating imports torch's compiler, a quarter of a
rank's start-up time; and the CPU engine restores the plain functions immediately (cpu_engine.py).
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .patching import ImportedNames


@contextmanager
def plain_functions() -> Iterator[None]:
    """Inside, functions that Megatron-Core defines are not compiled; torch.compile works for all others.

    Does nothing if Megatron-Core is already imported.
    """
    if "megatron.core" in sys.modules:
        yield
        return
    original = torch.compile

    def compile_others(model: Any = None, **options: Any) -> Any:
        if isinstance(model, types.FunctionType) and model.__module__.startswith("megatron.core."):
            return model
        return original(model, **options)

    torch.compile = compile_others
    try:
        yield
    finally:
        torch.compile = original
        # megatron.core.jit.jit_fuser, and modules that imported it.
        for module, name in ImportedNames().of(compile_others):
            setattr(module, name, original)

"""Megatron-Core's import without torch.compile, on machines without use for it.

Megatron-Core decorates some fifty functions with torch.compile. To decorate is to import torch's compiler, a quarter of
the seconds that a rank needs to start; and the CPU engine puts the plain functions back at once (cpu_engine.py).
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
    """Functions of Megatron-Core that are defined inside stay as they are; torch.compile does all else as ever.

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

"""Megatron-Core's functions without torch.compile, on machines without CUDA.

Megatron-Core decorates some fifty functions with torch.compile (its jit_fuser), which on a CPU needs a C++ compiler at
run time. Decorating also imports torch's compiler, a quarter of a rank's start-up time. Setting TORCHDYNAMO_DISABLE
works only before the first import; torch.compiler.set_stance would disable all compilation in the process. So
`plain_functions` imports Megatron-Core without compiling, and if it was imported before, `patches` restore its
functions. This affects Megatron-Core alone.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .patching import ImportedNames, Patch, loaded_megatron_modules


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


def patches() -> list[Patch]:
    """Returns patches by which loaded functions that were compiled become their originals."""
    why = "torch.compile on a CPU needs a C++ compiler"
    found = [Patch("megatron.core.jit", "jit_fuser", _identity, why, everywhere=True)]
    for module in loaded_megatron_modules():
        for owner in [module, *_classes(module)]:
            path = module.__name__ if owner is module else f"{module.__name__}.{owner.__qualname__}"
            found += [
                Patch(path, name, value._torchdynamo_orig_callable, why)
                for name, value in vars(owner).items()
                if _is_compiled(value)
            ]
    return found


def _identity(function: Any) -> Any:
    return function


def _is_compiled(value: Any) -> bool:
    return (
        isinstance(value, types.FunctionType)
        and (value.__module__ or "").startswith("megatron.core.")
        and hasattr(value, "_torchdynamo_orig_callable")
    )


def _classes(module: types.ModuleType) -> list[type]:
    """Returns the classes that `module` itself defines at its top level."""
    return [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]

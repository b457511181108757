"""A function of Megatron-Core as torch.compile leaves it, where Megatron-Core was imported without the compiler."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def as_if_compiled(module: str, name: str) -> Iterator[Any]:
    """The module's function stands there wrapped and marked as torch.compile does it, while the patches are off.

    Gives the plain one. Patches that are put on inside are taken off at the end.
    """
    from megatron_fp8 import mcore

    mcore.uninstall()
    owner = importlib.import_module(module)
    found = getattr(owner, name)
    plain = getattr(found, "_torchdynamo_orig_callable", found)

    @functools.wraps(plain)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{module}.{name} would be compiled here")

    compiled._torchdynamo_orig_callable = plain  # type: ignore[attr-defined]
    setattr(owner, name, compiled)
    try:
        yield plain
    finally:
        mcore.uninstall()  # or what stood here inside would come back with the next uninstall()
        setattr(owner, name, found)

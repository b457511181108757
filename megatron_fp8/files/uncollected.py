"""A pause of Python's garbage collector while very many objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no cycles are looked for. For what makes very many objects, of which all stay: that is half of the time
    that it takes to plan 10,000 sites."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

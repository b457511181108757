"""Where the host would wait for a GPU: each reading of a tensor's value, by the line that asks for it.

On a CPU nothing waits, so what is noted is who looks: Python's ways to a value, a synchronisation, a tensor made of host
memory on the model's device (a copy from pageable memory waits too). Of what ``cpu()`` gave, and of its views, the host
has the values: who looks at that waits for nothing. What torch reads by itself, in C++, its profiler tells (``hidden``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

LOOKS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero")
ON_CPUS = (
    "adam.py _update item",
    "emulated.py _scale_range __float__",
    "tensor.py scale_range __float__",
    "tensor.py scale_range __int__",
    "tensor.py scale_range __bool__",
)
"""torch's Adam for several tensors, and the choice of a CPU's product: neither is how a GPU's step goes."""
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")


class Waits:
    """``places``: 'file.py function how' of each look; ``hidden``: 'read in operation', where torch looks by itself."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.hidden: list[str] = []
        self._on_host: set[int] = set()  # numbers of storages that a copy to the host made
        self._kept: list[torch.Tensor] = []  # so that no other storage gets their numbers

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as another one, which the host has."""
        there = tensor.clone()
        self._on_host.add(torch._C._storage_id(there))  # type: ignore[attr-defined]
        self._kept.append(there)
        return there

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the host has this tensor's values."""
        return torch._C._has_storage(tensor) and torch._C._storage_id(tensor) in self._on_host  # type: ignore[attr-defined]

    def note(self, how: str) -> None:
        """Write it down, under the innermost function of Megatron-Core or this package."""
        frame: Any = sys._getframe(2)
        while frame.f_back is not None and not _ours(frame.f_code.co_filename):
            frame = frame.f_back
        self.places.append(f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_name} {how}")


def _ours(file: str) -> bool:
    return "megatron" in file and "/tests/" not in file


@contextmanager
def waits(hidden: bool = True) -> Iterator[Waits]:
    """Notes each look inside; ``hidden``: torch's own too, which its profiler takes a second to tell."""
    from megatron_fp8.numerics import host_sync

    seen = Waits()

    def noted(name: str, original: Any) -> Any:
        def look(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if seen.has(tensor):
                return original(tensor, *args, **kwargs)
            seen.note(name)
            return seen.copied(tensor) if name == "cpu" else original(tensor, *args, **kwargs)

        return look

    def made(original: Any) -> Any:
        def tensor(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") not in (None, "cpu"):
                seen.note("torch.tensor")
            return original(*args, **kwargs)

        return tensor

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(host_sync, "read_waits", lambda device: True))
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        if hidden:
            stack.enter_context(profile)
        for name in LOOKS:
            patched = noted(name, getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(torch.Tensor, name, patched))
        stack.enter_context(mock.patch.object(torch, "tensor", made(torch.tensor)))
        stack.enter_context(
            mock.patch.object(torch.cuda, "synchronize", lambda *_: seen.note("torch.cuda.synchronize"))
        )
        yield seen
    inside = ("aten::item", "aten::_local_scalar_dense")
    for event in profile.events() if hidden else []:
        if event.name in _READS:
            parent = event.cpu_parent
            while parent is not None and parent.name in inside:
                parent = parent.cpu_parent
            if parent is not None:
                seen.hidden.append(f"{event.name} in {parent.name}")

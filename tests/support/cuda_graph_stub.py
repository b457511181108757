"""A CUDA graph's stand-in on the CPU: every operation of a step written down, and run again on the same memory.

Like a captured graph, a replay runs no Python of the step, sees only what lies at the addresses that were there, and
writes its results to them. Operations that are no torch operations (compiled C) are not seen: switch them off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class Recorded(TorchDispatchMode):
    """``with recorded: step()`` runs and records; ``recorded.replay()`` runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = _waited(function(*args, **kwargs))
        if not getattr(
            function, "is_view", False
        ):  # a view computes nothing; ``x.data = y`` makes one of no base
            self._operations.append((function, args, kwargs, _tensors(out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Everything again, in order. A result that lies in memory of its own is written there."""
        for function, args, kwargs, results in self._operations:
            fresh = _tensors(_waited(function(*args, **kwargs)))
            for result, new in zip(results, fresh, strict=True):
                if result.untyped_storage().data_ptr() != new.untyped_storage().data_ptr() and result.numel():
                    _bytes(result).copy_(_bytes(new))

    @property
    def names(self) -> list[str]:
        """The operations."""
        return [str(function) for function, *_ in self._operations]


class Graph(Recorded):
    """As a captured graph is used: its first replay computes what the capture has not. Here the capture has."""

    captured = False

    def replay(self) -> None:
        if self.captured:
            super().replay()
        self.captured = True


@contextmanager
def new_graph() -> Iterator[Graph]:
    """In the place of megatron_fp8.train.cuda_graph.new_graph.

    Gloo's reduce-scatter copies its result in each ``wait``: a replay waits by itself, and must not copy the old one.
    """
    wait = torch.distributed.Work.wait

    def unseen(work: Any, *args: Any) -> Any:
        with _disable_current_modes():
            return wait(work, *args)

    with mock.patch.object(torch.distributed.Work, "wait", unseen), Graph() as graph:
        yield graph


def _waited(out: Any) -> Any:
    """The result of an operation; that of a collective is there."""
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.ScriptObject):
            torch.distributed.Work.unbox(leaf).wait()
    return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats have no copy on some versions."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor

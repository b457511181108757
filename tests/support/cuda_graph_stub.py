"""A CUDA graph's stand-in on the CPU: every operation of a step written down, and run again on the same memory.

Like a captured graph, a replay runs no Python of the step, sees only what lies at the addresses that were there, and
writes its results to them. Operations that are no torch operations (compiled C) are not seen: switch them off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Recorded(TorchDispatchMode):
    """``with recorded: step()`` runs and records; ``recorded.replay()`` runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        self._operations.append((function, args, kwargs, _tensors(out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        """Everything again, in order. A result that lies in memory of its own is written there."""
        for function, args, kwargs, results in self._operations:
            fresh = _tensors(function(*args, **kwargs))
            for result, new in zip(results, fresh, strict=True):
                if result.untyped_storage().data_ptr() != new.untyped_storage().data_ptr() and result.numel():
                    _bytes(result).copy_(_bytes(new))

    @property
    def names(self) -> list[str]:
        """The operations."""
        return [str(function) for function, *_ in self._operations]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats have no copy on some versions."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor

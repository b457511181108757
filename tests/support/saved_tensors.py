"""What autograd saves of a forward."""

from __future__ import annotations

from collections.abc import Callable

import torch


def saved(run: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors that a forward saves for its backward, in their order."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return kept

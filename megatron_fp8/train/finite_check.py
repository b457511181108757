"""Checks masters, moments and amax histories for NaN and Inf.

A NaN in a master is in a weight after the next step, and later casts find it. But an Inf in the second moment makes
Adam's update zero, so its weight never changes again; a row of an embedding may be read once in a thousand steps; and
an Inf in a history makes a scale of 1. Training then continues, and no step is skipped. One pass over everything takes
a quarter of Adam's time. So each iteration checks a sixteenth, and the result is reduced with the loss. A save checks
all that it writes, and the end of a run checks everything: no complete checkpoint and no final model has undetected NaN
or Inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..mcore.names import named_parameters
from ..mcore.optimizer.compact_moments import Moment
from ..mcore.optimizer.optimizer_models import parts_of
from ..mcore.runtime import state_of, unwrap
from ..state.amax_ring_buffer import AmaxRingBuffer
from ..state.collectives import own_device

PARTS = 16
"""Number of iterations for one pass over everything."""


class FiniteCheck:
    """Checks one rank's optimizer and FP8 state.

    Args:
        chunks: model chunks, in DistributedDataParallel.
        optimizer: Megatron-Core's optimizer of these chunks.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._parts: list[list[torch.Tensor | AmaxRingBuffer]] = []

    def turn(self) -> torch.Tensor:
        """Number of damaged tensors in the next part: float64 [], on the state's device, without synchronisation."""
        if not self._parts:  # listed anew in each round: the first step creates the moments
            tensors = [tensor for _, tensor in self._named()]
            self._parts = [tensors[first::PARTS] for first in reversed(range(PARTS))]
        return self._count(self._parts.pop())

    def forget(self) -> None:
        """Clear the list of tensors, after some may have been replaced."""
        self._parts.clear()

    def all(self) -> torch.Tensor:
        """Number of damaged tensors in all parts; as `turn`."""
        return self._count([tensor for _, tensor in self._named()])

    def first(self) -> str:
        """Describe the first damaged tensor (NaN, Inf, or values that no cast wrote); '' if there is none."""
        for name, tensor in self._named():
            if bool(_is_damaged(tensor)):
                rings = isinstance(tensor, AmaxRingBuffer)
                return f"{name} {'hold a value that no cast recorded' if rings else 'holds NaN or Inf'}"
        return ""

    def _count(self, tensors: list[torch.Tensor | AmaxRingBuffer]) -> torch.Tensor:
        device = own_device()
        damaged = torch.zeros((), dtype=torch.float64, device=device)
        for tensor in tensors:
            damaged += _is_damaged(tensor).to(device)
        return damaged

    def _named(self) -> Iterator[tuple[str, torch.Tensor | AmaxRingBuffer]]:
        names = {}
        for chunk in self._chunks:
            for name, parameter in named_parameters(unwrap(chunk)):
                names[id(getattr(parameter, "main_param", parameter))] = name
        for part in parts_of(self._optimizer):
            for group in part.param_groups if part.optimizer is not None else ():
                for master in group["params"]:
                    name = names.get(id(master), "a parameter")
                    yield f"the master of {name}", master
                    for key, moment in part.optimizer.state.get(master, {}).items():
                        if isinstance(moment, torch.Tensor) and moment.is_floating_point():
                            yield f"{key} of {name}", moment
        for arena in state_of(unwrap(self._chunks[0]).config).arenas:
            for group_histories in arena.histories():
                yield (
                    f"the amax histories of {group_histories.slots[0].name} and {len(group_histories.slots) - 1} others",
                    group_histories.rings,
                )


@torch.no_grad()
def _is_damaged(tensor: torch.Tensor | AmaxRingBuffer) -> torch.Tensor:
    """bool []: whether `tensor` (any shape) has NaN or Inf; one pass, no copy."""
    if isinstance(tensor, AmaxRingBuffer):
        return tensor.damaged()
    if isinstance(tensor, Moment):
        return torch.stack([_is_damaged(part) for part in tensor.stored_tensors()]).any()
    values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return ~torch.stack(values.aminmax()).isfinite().all()

"""Finiteness of masters, moments and amax histories.

A NaN in a master is in a weight after the next step, and the casts after it find it. But the second moment's Inf makes
Adam's update zero, so that its weight never moves again, a row of an embedding may be read once in a thousand steps,
and the Inf in a history makes a scale of 1: training goes on, and nothing is skipped. One reading of all of it takes a
quarter of Adam's time; so each iteration reads a sixteenth, and the answer travels with the loss. A save reads all of
what it writes, and the end of a run everything: no complete checkpoint, and no model, has what was not found yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..mcore.names import named_parameters
from ..mcore.optimizer.compact_moments import Moment
from ..mcore.optimizer.models import parts_of
from ..mcore.runtime import state_of, unwrap
from ..state.ranks import own_device
from ..state.rings import Rings

PARTS = 16
"""So many iterations read everything once."""


class StateCheck:
    """Looks at one rank's optimizer and FP8 state.

    Args:
        chunks: of the model, in DistributedDataParallel.
        optimizer: Megatron-Core's, of these chunks.
    """

    def __init__(self, chunks: list[Any], optimizer: Any) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._parts: list[list[torch.Tensor | Rings]] = []

    def turn(self) -> torch.Tensor:
        """How many tensors of the next part are damaged: float64 [], on the state's device. Nothing is read back."""
        if not self._parts:  # listed anew in each round: moments are made by the first step
            tensors = [tensor for _, tensor in self._named()]
            self._parts = [tensors[first::PARTS] for first in reversed(range(PARTS))]
        return self._count(self._parts.pop())

    def forget(self) -> None:
        """Other tensors may have taken the place of those listed: list them anew."""
        self._parts.clear()

    def all(self) -> torch.Tensor:
        """The same of everything."""
        return self._count([tensor for _, tensor in self._named()])

    def first(self) -> str:
        """What holds NaN or Inf, or what nobody wrote, in words; '' if nothing does."""
        for name, tensor in self._named():
            if bool(_bad(tensor)):
                rings = isinstance(tensor, Rings)
                return f"{name} {'hold a number that nobody recorded' if rings else 'holds NaN or Inf'}"
        return ""

    def _count(self, tensors: list[torch.Tensor | Rings]) -> torch.Tensor:
        device = own_device()
        found = torch.zeros((), dtype=torch.float64, device=device)
        for tensor in tensors:
            found += _bad(tensor).to(device)
        return found

    def _named(self) -> Iterator[tuple[str, torch.Tensor | Rings]]:
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
            for held in arena.histories():
                yield (
                    f"the amax histories of {held.slots[0].name} and {len(held.slots) - 1} others",
                    held.rings,
                )


@torch.no_grad()
def _bad(tensor: torch.Tensor | Rings) -> torch.Tensor:
    """bool []: whether it holds NaN or Inf, in one pass without a copy."""
    if isinstance(tensor, Rings):
        return tensor.damaged()
    if isinstance(tensor, Moment):
        return torch.stack([_bad(stored) for stored in tensor.stored_tensors()]).any()
    values = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    if not values.numel():
        return torch.zeros((), dtype=torch.bool, device=values.device)
    return ~torch.stack(values.aminmax()).isfinite().all()

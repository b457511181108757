"""Checks masters, moments and amax histories for NaN and Inf.

A NaN in a master is in a weight after the next step, and later casts find it. But an Inf in the second moment makes
Adam's update zero, so its weight never changes again; a row of an embedding may be read once in a thousand steps; and
an Inf in a history makes a scale of 1. Training then continues, and no step is skipped. One pass over everything takes
a quarter of Adam's time. So each iteration checks a sixteenth, and the result is reduced with the loss. A save checks
all that it writes, and the end of a run checks everything: no complete checkpoint and no final model has undetected NaN
or Inf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from ...mcore.names import named_parameters
from ...mcore.optimizer.adam import Moment
from ...mcore.optimizer.optimizer_setup import parts_of
from ...mcore.runtime import state_of, unwrap
from ...state.amax_history import AmaxRingBuffer
from ...state.collectives import first_rank_with, own_device
from ...state.guard import LEFT
from ...telemetry.health import forward_order

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


_KINDS = ("state", "weight", "scale", "cast", "backward cast", "gradient")
_OF_BACKWARD = ("backward cast", "gradient")
_SLOT = re.compile(r"\.(input|weight|grad_output)(\.\w+)?$")  # a slot's name after its site's
_PLACES, _STAGES = 24, 12  # bits of the sort key of kind, stage and place


def first_not_finite(chunks: list[Any], check: FiniteCheck | None = None) -> tuple[str, str] | None:
    """Find the likeliest cause of NaN or Inf on any rank, as (kind, line); None if there is none. Collective.

    Kinds, in this order: 'state' of the optimizer and of delayed scaling, found by ``check``; 'weight'; 'scale', a
    delayed scale or amax that no cast can have written; 'cast', NaN or Inf in an FP8 cast of an input or a weight in
    the last iteration; 'backward cast', of an output's gradient; 'gradient', of a parameter. Within a kind the order of
    execution decides, which for gradients is the model's backwards, then the lowest rank: NaN from one rank's cast
    reaches the other ranks in the following layers.
    """
    stage, own, order = parallel_state.get_pipeline_model_parallel_rank(), None, 0
    if check is not None and (state := check.first()):
        own, order = ("state", state), stage << _PLACES
    elif first := next(_not_finite(chunks), None):
        kind, place, line = first
        own = (kind, line)
        if kind in _OF_BACKWARD:
            stage = parallel_state.get_pipeline_model_parallel_world_size() - 1 - stage
        order = (_KINDS.index(kind) << _PLACES + _STAGES) + (stage << _PLACES) + place
    if (first_found := first_rank_with(own, order=order)) is None:
        return None
    rank, (kind, line) = first_found
    return kind, f"{line} on rank {rank}"


def _not_finite(chunks: list[Any]) -> Iterator[tuple[str, int, str]]:
    """(kind, place in the order of execution, line) of each NaN or Inf on this rank."""
    parameters = [(name, p) for chunk in chunks for name, p in named_parameters(unwrap(chunk))]
    for place, (name, parameter) in enumerate(parameters):
        if count := _count(parameter.detach()):
            yield "weight", place, f"the weight {name} holds {count} NaN or Inf"
    arenas = state_of(unwrap(chunks[0]).config).arenas
    for arena in arenas:
        for words, bad in zip(("delayed scale", "amax"), arena.own_damage.tolist(), strict=True):
            for slot in arena.slots[: len(bad)]:
                if bad[slot.index]:
                    yield (
                        "scale",
                        slot.index,
                        f"the {words} of {slot.name} was a number that no cast can have made",
                    )
    order = forward_order(name.removesuffix(".weight") for name, _ in parameters)
    slots = [(arena, slot) for arena in arenas for slot in arena.slots]
    slots.sort(key=lambda pair: order.get(_SLOT.sub("", pair[1].name.removesuffix(LEFT)), len(order)))
    # A gradient that is cast for each GEMM has a second slot, SITE.grad_output.wgrad.
    forward, backward = (
        [p for p in slots if (".grad_output" in p[1].name) == last] for last in (False, True)
    )
    for kind, pairs in (("cast", forward), ("backward cast", backward[::-1])):
        for place, (arena, slot) in enumerate(pairs):
            own = arena.own_nonfinite
            if slot.index < len(own) and (count := int(own[slot.index])):
                what = "" if slot.name.endswith(LEFT) else "the FP8 cast of "
                yield kind, place, f"{what}{slot.name.removesuffix(LEFT)} met {count} NaN or Inf"
    for place, (name, parameter) in enumerate(reversed(parameters)):
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None and (count := _count(gradient)):
            yield "gradient", place, f"the gradient of {name} holds {count} NaN or Inf"


@torch.no_grad()
def _count(values: torch.Tensor) -> int:
    """Number of NaN and Inf in `values`, of any shape and dtype, FP8 parameters too."""
    plain = values if values.dtype in (torch.float32, torch.bfloat16, torch.float16) else values.float()
    return int((~torch.isfinite(plain)).sum())

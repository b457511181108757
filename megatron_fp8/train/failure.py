"""Training failures, and a search for the first NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from ..mcore.names import named_parameters
from ..mcore.runtime import state_of, unwrap
from ..state.collectives import first_rank_with
from .finite_check import FiniteCheck


class TrainingFailed(RuntimeError):
    """Training cannot continue. The message is one line: what happened, and what to do."""


_KINDS = ("state", "weight", "scale", "cast", "gradient")
_PLACES, _STAGES = 24, 12  # bits of the sort key of kind, stage and place


def first_not_finite(chunks: list[Any], check: FiniteCheck | None = None) -> tuple[str, str] | None:
    """Find the likeliest cause of NaN or Inf on any rank, as (kind, line); None if there is none. Collective.

    Kinds, in this order: 'state' of the optimizer and of delayed scaling, found by ``check``; 'weight'; 'scale', a
    delayed scale or amax that no cast can have written; 'cast', NaN or Inf in an FP8 cast of the last iteration, inputs
    before gradients; 'gradient'. Within a kind the model's order decides, then the lowest rank: NaN from one rank's
    cast reaches the other ranks in the following layers.
    """
    stage, own, order = parallel_state.get_pipeline_model_parallel_rank(), None, 0
    if check is not None and (state := check.first()):
        own, order = ("state", state), stage << _PLACES
    elif first := next(_not_finite(chunks), None):
        kind, place, line = first
        own = (kind, line)
        order = (_KINDS.index(kind) << _PLACES + _STAGES) + (stage << _PLACES) + place
    if (first_found := first_rank_with(own, order=order)) is None:
        return None
    rank, (kind, line) = first_found
    return kind, f"{line} on rank {rank}"


def _not_finite(chunks: list[Any]) -> Iterator[tuple[str, int, str]]:
    """(kind, place in the model, line) of each NaN or Inf on this rank."""
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
    slots = [(arena, slot) for arena in arenas for slot in arena.slots]
    slots.sort(key=lambda pair: pair[1].name.endswith("grad_output"))
    for place, (arena, slot) in enumerate(slots):
        own = arena.own_nonfinite
        if slot.index < len(own) and (count := int(own[slot.index])):
            yield "cast", place, f"the FP8 cast of {slot.name} met {count} NaN or Inf"
    for place, (name, parameter) in enumerate(parameters):
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None and (count := _count(gradient)):
            yield "gradient", place, f"the gradient of {name} holds {count} NaN or Inf"


@torch.no_grad()
def _count(values: torch.Tensor) -> int:
    """Number of NaN and Inf in `values`, of any shape and dtype, FP8 parameters too."""
    plain = values if values.dtype in (torch.float32, torch.bfloat16, torch.float16) else values.float()
    return int((~torch.isfinite(plain)).sum())

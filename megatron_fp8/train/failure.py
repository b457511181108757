"""A training that cannot go on: how that is raised, and where the first NaN or Inf is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..mcore.runtime import state_of, unwrap


class TrainingFailed(RuntimeError):
    """Training cannot go on. The message is one line: what happened, and what to do."""


def first_not_finite(chunks: list[Any]) -> tuple[str, str] | None:
    """(kind, line) of what on any rank holds NaN or Inf now, the likeliest cause first; None: nothing does. Collective.

    Kinds, in this order: 'weight'; 'cast', what an FP8 cast of the last iteration met, inputs before gradients;
    'gradient'. Within a kind the lowest rank, which has the earliest layers, and the order of the model.
    """
    mine = next(_not_finite(chunks), None)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    kinds = ("weight", "cast", "gradient")
    ranked = [(kinds.index(one[0]), rank, one[1]) for rank, one in enumerate(found) if one is not None]
    if not ranked:
        return None
    kind, rank, line = min(ranked)
    return kinds[kind], f"{line} on rank {rank}"


def _not_finite(chunks: list[Any]) -> Iterator[tuple[str, str]]:
    named = [(name, p) for chunk in chunks for name, p in unwrap(chunk).named_parameters()]
    for name, parameter in named:
        if count := _count(parameter.detach()):
            yield "weight", f"the weight {name} holds {count} NaN or Inf"
    slots = [(arena, slot) for arena in state_of(unwrap(chunks[0]).config).arenas for slot in arena.slots]
    for arena, slot in sorted(slots, key=lambda pair: pair[1].name.endswith("grad_output")):
        own = arena.own_nonfinite
        if slot.index < len(own) and (count := int(own[slot.index])):
            yield "cast", f"the FP8 cast of {slot.name} met {count} NaN or Inf"
    for name, parameter in named:
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None and (count := _count(gradient)):
            yield "gradient", f"the gradient of {name} holds {count} NaN or Inf"


@torch.no_grad()
def _count(values: torch.Tensor) -> int:
    """NaN and Inf among `values` of any dtype, FP8 parameters too."""
    plain = values if values.dtype in (torch.float32, torch.bfloat16, torch.float16) else values.float()
    return int((~torch.isfinite(plain)).sum())

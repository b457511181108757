"""Delayed-scaling state beside Megatron-Core's ``model.state_dict()``, for custom training loops.

It works like nn/state_dict.py. A model's ``state_dict()`` has its weights, under Megatron-Core's keys in any
precision. ``sharded_state_dict()`` also has the delayed state, in the whole model's shapes, for checkpoints that
another layout can load. The state here is one rank's, for the same rank of the same layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ...state.arena import Slot, check_saved, load_slots, saved_slots
from ..names import numbered, split_expert
from ..runtime import state_of, unwrap
from ..sites import fp8_linears, prepare
from .fp8_state import delayed_quantizers

ITERATION = "iteration"


def fp8_state_dict(model_chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Returns all FP8 state of this rank that training carries from one iteration to the next, except the weights.

    Args:
        model_chunks: a list of the model, or of its chunks, in DistributedDataParallel or not.

    Returns:
        Tensors on the CPU, for torch.save between two iterations: ``iteration`` (int64 []), and with delayed scaling
            for each operand of each linear ``NAME.ROLE.scale`` (float32 [1]), ``NAME.ROLE.amax_history`` (float32
            [length]) and ``NAME.ROLE.warm`` (uint8 [1]). NAME is the linear's in the whole model.

    Raises ValueError: FP8 cannot run as the config asks.
    """
    prepare(model_chunks)
    state = state_of(unwrap(model_chunks[0]).config)
    iteration = torch.tensor(state.iteration, dtype=torch.int64, device="cpu")
    return {ITERATION: iteration, **saved_slots(_slots(model_chunks))}


def load_fp8_state_dict(model_chunks: list[Any], saved: Mapping[str, torch.Tensor]) -> None:
    """Restores the result of ``fp8_state_dict`` on this rank: training continues with the same bits.

    Before or after the weights are loaded. A history of another length gives its latest entries that fit.

    Raises:
        ValueError: the linears or recipes are not the saved ones. Nothing is changed then.
    """
    expected = fp8_state_dict(model_chunks)
    saved = _rename_old_experts(saved, expected)
    check_saved(expected, saved, "Build the model as the saved one was, in the same layout")
    state = state_of(unwrap(model_chunks[0]).config)
    state.iteration = int(saved[ITERATION])
    state.weight_generation += 1  # cached quantised weights are stale
    load_slots(_slots(model_chunks), saved)


def _rename_old_experts(
    saved: Mapping[str, torch.Tensor], expected: Collection[str]
) -> Mapping[str, torch.Tensor]:
    """Renames state from versions in which each rank numbered its experts from 0."""
    first: dict[str, int] = {}
    for stem, number in map(split_expert, expected):
        first[stem] = min(number, first.get(stem, number))
    before = {
        name: numbered(name, number - first[stem])
        for name in expected
        for stem, number in [split_expert(name)]
    }
    if saved.keys() != set(before.values()):
        return saved
    return {name: saved[old] for name, old in before.items()}


def _slots(model_chunks: list[Any]) -> dict[str, Slot]:
    return {
        f"{linear.fp8_site.plan.name}.{role}": quantizer.slot
        for linear in fp8_linears(model_chunks)
        for role, quantizer in delayed_quantizers(linear).items()
    }

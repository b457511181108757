"""Delayed scaling beside Megatron-Core's ``model.state_dict()``, for training loops of one's own; as nn/state_dict.py.

A model's ``state_dict()`` has its weights, under the keys that Megatron-Core gives them with any precision.
``sharded_state_dict()`` has the delayed state too, in the whole model's shapes, for checkpoints that another layout can
read; what is here is one rank's, for the same rank of the same layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ...state.arena import Slot
from ...state.saved import check_saved, load_slots, saved_slots
from ..names import numbered, split_expert
from ..runtime import state_of, unwrap
from ..sites import fp8_linears, prepare
from .fp8_state import delayed_quantizers

ITERATION = "iteration"


def fp8_state_dict(model_chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Everything that training in FP8 remembers on this rank from one iteration to the next, except the weights.

    Args:
        model_chunks: a list of the model, or of its chunks, in DistributedDataParallel or not.

    Returns:
        Tensors on the CPU, to be saved with torch.save between two iterations: ``iteration`` (int64 []), and with delayed
        scaling for each operand of each linear ``NAME.ROLE.scale`` (float32 [1]), ``NAME.ROLE.amax_history`` (float32
        [length]) and ``NAME.ROLE.warm`` (uint8 [1]). NAME is the linear's in the whole model.

    Raises ValueError: FP8 cannot run as the config asks.
    """
    prepare(model_chunks)
    state = state_of(unwrap(model_chunks[0]).config)
    iteration = torch.tensor(state.iteration, dtype=torch.int64, device="cpu")
    return {ITERATION: iteration, **saved_slots(_slots(model_chunks))}


def load_fp8_state_dict(model_chunks: list[Any], saved: Mapping[str, torch.Tensor]) -> None:
    """Put back what ``fp8_state_dict`` gave on this rank: training goes on with the bits it would have had.

    Before or after the weights are loaded. Of a history of another length the latest entries that fit are taken.

    Raises:
        ValueError: the linears or recipes are not those that were saved. Nothing is changed then.
    """
    expected = fp8_state_dict(model_chunks)
    saved = _renumbered(saved, expected)
    check_saved(expected, saved, "Build the model as the saved one was, in the same layout")
    state = state_of(unwrap(model_chunks[0]).config)
    state.iteration = int(saved[ITERATION])
    state.weight_generation += 1  # whatever was quantised before is of other weights
    load_slots(_slots(model_chunks), saved)


def _renumbered(saved: Mapping[str, torch.Tensor], expected: Collection[str]) -> Mapping[str, torch.Tensor]:
    """What was saved when each rank numbered its experts from 0, under the names of today."""
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

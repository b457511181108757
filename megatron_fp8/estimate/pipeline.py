"""Microbatches in flight on a pipeline stage, by Megatron-Core's schedules.

Without virtual stages a stage runs as many forwards as there are stages after it, then alternates forward and
backward (1F1B). With virtual stages its chunks alternate, with a group of microbatches each, and more are in
flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .model import Model


def peak(model: Model, stage: int, microbatches: int, sizes: Mapping[int, int]) -> tuple[int, Counter[int]]:
    """(peak bytes, microbatches in flight at the peak by chunk) of a stage.

    Args:
        sizes: chunk of the stage -> bytes that one microbatch saves there until its backward pass.
    """
    stages, parts = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    forwards = _order(model, microbatches)
    warmup = stages - stage - 1
    if parts > 1:
        group = model.microbatch_group_size_per_vp_stage or stages
        warmup = 2 * warmup + (parts - 1) * group
    in_flight: Counter[int] = Counter()
    best, at_peak = 0, Counter[int]()
    for index, part in enumerate(forwards):
        in_flight[part] += 1
        size = sum(sizes[chunk] * count for chunk, count in in_flight.items())
        if size > best:
            best, at_peak = size, in_flight.copy()
        if index >= warmup:  # each forward is followed by a backward, with chunks in reverse order
            in_flight[parts - 1 - forwards[index - warmup]] -= 1
    return best, at_peak


def _order(model: Model, microbatches: int) -> list[int]:
    """The chunk of each forward of a stage, in order."""
    parts = model.virtual_pipeline_model_parallel_size or 1
    group = model.microbatch_group_size_per_vp_stage or model.pipeline_model_parallel_size
    if parts == 1:
        return [0] * microbatches
    found = []
    for first in range(0, microbatches, group):
        count = min(group, microbatches - first)
        found += [part for part in range(parts) for _ in range(count)]
    return found


def bubble(model: Model, microbatches: int) -> float:
    """Idle time of a stage relative to its busy time."""
    parts = model.virtual_pipeline_model_parallel_size or 1
    return (model.pipeline_model_parallel_size - 1) / (parts * microbatches)

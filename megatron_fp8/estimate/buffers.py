"""Buffers of Megatron-Core's DistributedDataParallel, and each rank's part of the optimizer state.

A buffer contains the gradients (and with the distributed optimizer the parameters) of one dtype and one
data-parallel group, from the last parameter to the first. With the distributed optimizer each parameter
starts at a multiple of 64 values, each bucket ends at a multiple of 128 and of the group's size, and each
rank owns an equal part of each bucket, with the master weights and moments for it. This models
core/distributed/param_and_grad_buffer.py of Megatron-Core 0.16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .model import Chunk, Model
from .parameters import Parameter, of_chunk
from .settings import Settings
from .sites import Plans, lives_as_fp8


@dataclass(frozen=True)
class Bucket:
    """A part of a buffer that one collective reduces or gathers: parameter positions, and padded size."""

    places: tuple[tuple[Parameter, int], ...]
    size: int

    def pieces(self, ranks: int) -> list[list[int]]:
        """Sizes of the pieces of parameters that each of ``ranks`` owns."""
        share = self.size // ranks
        owned: list[list[int]] = [[] for _ in range(ranks)]
        for parameter, start in self.places:
            end = start + parameter.size
            for rank in range(start // share, -(-end // share)):
                owned[rank].append(min(end, (rank + 1) * share) - max(start, rank * share))
        return owned


@dataclass(frozen=True)
class Buffer:
    """Parameters that share collectives.

    Attributes:
        fp8: whether they are FP8 parameters.
        expert: whether they are experts', with another data-parallel group.
        ranks: size of the group.
        buckets: in backward order.
    """

    fp8: bool
    expert: bool
    ranks: int
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Number of values, padding included."""
        return sum(bucket.size for bucket in self.buckets)

    @property
    def values(self) -> int:
        """Number of parameter values."""
        return sum(parameter.size for bucket in self.buckets for parameter, _ in bucket.places)


def of_chunk_buffers(settings: Settings, chunk: Chunk, plans: Plans) -> list[Buffer]:
    """The buffers of one rank's chunk, in Megatron-Core's order."""
    model = settings.model
    grouped: dict[tuple[bool, bool], list[Parameter]] = {}
    for parameter in of_chunk(model, chunk):
        fp8 = parameter.site is not None and lives_as_fp8(settings, plans.of(parameter.site, parameter.layer))
        grouped.setdefault((is_apart(model, parameter), fp8), []).append(parameter)
    found = []
    for expert in (False, True):
        for (apart, fp8), parameters in grouped.items():
            if apart == expert:
                ranks = group_size(settings, expert)
                found.append(Buffer(fp8, expert, ranks, tuple(_buckets(settings, chunk, parameters, ranks))))
    return found


def is_apart(model: Model, parameter: Parameter) -> bool:
    """Whether a parameter uses the experts' data-parallel group, i.e. is an expert's under expert parallelism."""
    return parameter.expert and model.expert_model_parallel_size > 1


def group_size(settings: Settings, expert: bool) -> int:
    """Size of the data-parallel group with the same parameters, context-parallel ranks included.

    Raises ValueError if expert parallelism does not divide it.
    """
    model = settings.model
    if not expert:
        return settings.data_parallel * model.context_parallel_size
    of_experts = model.expert_ranks
    return settings.gpus // of_experts


def _buckets(settings: Settings, chunk: Chunk, parameters: list[Parameter], ranks: int) -> list[Bucket]:
    distributed = settings.optimizer.use_distributed_optimizer
    most = None
    if settings.optimizer.overlap_grad_reduce and chunk.stage == 0 and chunk.part == 0:
        most = max(40_000_000, 1_000_000 * settings.data_parallel)
    ends_at = math.lcm(ranks, 128) if distributed else 1
    starts_at = 64 if distributed else 1
    found: list[Bucket] = []
    places: list[tuple[Parameter, int]] = []
    at = 0

    def close() -> None:
        nonlocal at, places
        found.append(Bucket(tuple(places), _round_up(at, ends_at)))
        at, places = 0, []

    # Buckets end at multiples of 128, so padding by bucket offset equals padding by buffer offset.
    for parameter in reversed(parameters):
        alone = parameter.tied and distributed
        if alone and places:
            at = _round_up(at, starts_at)
            close()
        at = _round_up(at, starts_at)
        places.append((parameter, at))
        at += parameter.size
        if alone or (most is not None and at >= most):
            close()
    if places:
        close()
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

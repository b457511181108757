"""Bytes a rank holds between iterations: weights, cached codes, gradients, master weights, moments.

The values are exact, padding included: tests/functional/test_estimate.py compares them with trainings.

A buffer of Megatron-Core's DistributedDataParallel contains the gradients (and with the distributed optimizer
the parameters) of one dtype and one data-parallel group, from the last parameter to the first. With the
distributed optimizer each parameter starts at a multiple of 64 values, each bucket ends at a multiple of 128
and of the group's size, and each rank owns an equal part of each bucket, with the master weights and moments
for it. This models core/distributed/param_and_grad_buffer.py of Megatron-Core 0.16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from .config_reader import Settings
from .fp8_weights import is_fp8_parameter, shares_gradient_buffer, stored_weight
from .model import OUTPUT, Chunk, Model
from .parameter_counts import Parameter, chunk_parameters

_BLOCK = 128  # values per scale of a compact moment (mcore/optimizer/adam.py)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer state on one rank.

    Attributes:
        weights: parameters: BF16 values, or codes and scales, with their buffers.
        kept_codes: cached codes and scales of BF16 weights, reused across microbatches, in all directions.
        gradients: the float32 gradient buffer.
        masters: the optimizer's float32 weights.
        moments: Adam's exp_avg and exp_avg_sq.
    """

    weights: int = 0
    kept_codes: int = 0
    gradients: int = 0
    masters: int = 0
    moments: int = 0

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def total(self) -> int:
        """The sum."""
        return sum(getattr(self, item.name) for item in fields(self))


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
    def parameters(self) -> list[Parameter]:
        """Its parameters."""
        return [parameter for bucket in self.buckets for parameter, _ in bucket.places]


def stage_state(settings: Settings, chunks: Iterable[Chunk]) -> StateBytes:
    """Bytes of the fullest rank of a pipeline stage with these chunks."""
    found = StateBytes()
    owned: list[list[int]] = []  # masters and moments by rank of the stage
    for chunk in chunks:
        for buffer in chunk_buffers(settings, chunk):
            found += _buffer(settings, buffer)
            owned = _sum_by_rank(owned, _optimizer(settings, buffer))
        if chunk.last:
            rows = settings.model.padded_vocabulary // settings.model.tensor_model_parallel_size
            found += StateBytes(
                kept_codes=_cached_code_bytes(settings, OUTPUT, (rows, settings.model.hidden_size))
            )
    masters, moments = max(owned, key=sum) if owned else (0, 0)
    return replace(found, masters=masters, moments=moments)


def _sum_by_rank(owned: list[list[int]], more: list[list[int]]) -> list[list[int]]:
    """Sums by rank. Experts' groups are smaller, so their ranks repeat within the dense group."""
    if not owned:
        return more
    count = max(len(owned), len(more))
    return [
        [a + b for a, b in zip(owned[i % len(owned)], more[i % len(more)], strict=True)] for i in range(count)
    ]


def _buffer(settings: Settings, buffer: Buffer) -> StateBytes:
    distributed, shared = settings.optimizer.use_distributed_optimizer, shares_gradient_buffer(settings)
    parameters, size, codes = buffer.parameters, settings.model.activation_bytes, 0
    values = sum(parameter.size for parameter in parameters)
    if buffer.fp8:
        weights = sum(stored_weight(settings.plan(p.site), *p.shape) for p in parameters)
        weights += 4 * len(parameters) * bool(settings.model.fp4)  # NVFP4's amax of the tensor
        if distributed and not shared:
            weights += buffer.size - values  # padding of the buffer with the codes
    else:
        weights = size * (buffer.size if distributed else values)
        if distributed and shared:
            # Megatron-Core gathers these through an extra buffer (parameters are not views of param_data).
            weights = size * (values + buffer.size)
        codes = sum(_cached_code_bytes(settings, p.site, p.shape) for p in parameters if p.site)
    return StateBytes(weights, codes, 4 * buffer.size)


def _cached_code_bytes(settings: Settings, site: str, shape: tuple[int, ...]) -> int:
    """Bytes of the cached codes of a BF16 weight [n, k]: quantized once an iteration, reused for all its
    microbatches. The output projection's weight stays BF16, tied or not."""
    plan, model = settings.plan(site), settings.model
    if plan.precision == "bf16" or is_fp8_parameter(settings, plan):
        return 0
    both = stores_both(settings)
    n, k = shape
    return stored_weight(plan, n, k, both_contiguous=both, keeps_columnwise=model.fp8_keep_columnwise)


def stores_both(settings: Settings) -> bool:
    """Whether symmetric codes are stored once per direction, as tensor cores read them."""
    return settings.on_gpu and settings.model.fp8_backend != "emulated"


def _optimizer(settings: Settings, buffer: Buffer) -> list[list[int]]:
    """(masters, moments) of each rank of the buffer's group."""
    if settings.optimizer.use_distributed_optimizer:
        pieces: list[list[int]] = [[] for _ in range(buffer.ranks)]
        for bucket in buffer.buckets:
            for rank, more in enumerate(bucket.pieces(buffer.ranks)):
                pieces[rank] += more
    else:
        pieces = [[parameter.size for parameter in buffer.parameters]] * buffer.ranks
    half = settings.model.bf16 or settings.model.fp16
    compact = settings.optimizer.state_dtype == "fp8"
    return [
        [4 * sum(sizes) if half else 0, sum(map(_compact_moments, sizes)) if compact else 8 * sum(sizes)]
        for sizes in pieces
    ]


def _compact_moments(size: int) -> int:
    """Bytes of compact moments of ``size`` values: E4M3 and float16, each with a float32 scale per 128 values."""
    return 3 * size + 8 * -(-size // _BLOCK)


def chunk_buffers(settings: Settings, chunk: Chunk) -> list[Buffer]:
    """The buffers of one rank's chunk, in Megatron-Core's order."""
    model = settings.model
    grouped: dict[tuple[bool, bool], list[Parameter]] = {}
    for parameter in chunk_parameters(model, chunk):
        fp8 = bool(parameter.site) and is_fp8_parameter(settings, settings.plan(parameter.site))
        grouped.setdefault((is_apart(model, parameter), fp8), []).append(parameter)
    found = []
    for (expert, fp8), parameters in sorted(grouped.items(), key=lambda entry: entry[0][0]):
        ranks = group_size(settings, expert)
        found.append(Buffer(fp8, expert, ranks, tuple(_buckets(settings, chunk, parameters, ranks))))
    return found


def is_apart(model: Model, parameter: Parameter) -> bool:
    """Whether a parameter uses the experts' data-parallel group, i.e. is an expert's under expert parallelism."""
    return parameter.expert and model.expert_model_parallel_size > 1


def group_size(settings: Settings, expert: bool) -> int:
    """Size of the data-parallel group with the same parameters, context-parallel ranks included."""
    if expert:
        return settings.gpus // settings.model.expert_ranks
    return settings.data_parallel * settings.model.context_parallel_size


def _buckets(settings: Settings, chunk: Chunk, parameters: list[Parameter], ranks: int) -> list[Bucket]:
    distributed = settings.optimizer.use_distributed_optimizer
    most = math.inf
    if settings.optimizer.overlap_grad_reduce and chunk.stage == 0 and chunk.part == 0:
        most = max(40_000_000, 1_000_000 * settings.data_parallel)
    ends_at, starts_at = (math.lcm(ranks, 128), 64) if distributed else (1, 1)
    found: list[Bucket] = []
    places: list[tuple[Parameter, int]] = []
    at = 0

    def close() -> None:
        nonlocal at, places
        if places:
            found.append(Bucket(tuple(places), _round_up(at, ends_at)))
        at, places = 0, []

    # Buckets end at multiples of 128, so padding by bucket offset equals padding by buffer offset.
    for parameter in reversed(parameters):
        alone = parameter.tied and distributed
        at = _round_up(at, starts_at)
        if alone:
            close()
        places.append((parameter, at))
        at += parameter.size
        if alone or at >= most:
            close()
    close()
    return found


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

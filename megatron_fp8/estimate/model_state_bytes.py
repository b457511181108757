"""Bytes a rank holds between iterations: weights, cached codes, gradients, master weights, moments.

The values are exact, padding included: tests/functional/test_estimate.py compares them with trainings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from .buffers import Buffer, of_chunk_buffers
from .model import Chunk, Model
from .parameters import Parameter
from .settings import Settings
from .sites import Plans, lives_as_fp8, shares_gradient_buffer, stored_weight

_BLOCK = 128  # values per scale of a compact moment (mcore/optimizer/compact_moments.py)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one rank.

    Attributes:
        weights: parameters: BF16 values, or codes and scales, with their buffers.
        kept_codes: cached codes and scales of BF16 weights, reused across microbatches, in all directions.
        gradients: the float32 gradient buffer.
        masters: the optimizer's float32 weights.
        moments: both of Adam's.
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


def of_stage(
    settings: Settings, chunks: Iterable[Chunk], plans: Plans, *, both_contiguous: bool = False
) -> StateBytes:
    """Bytes of a pipeline stage's fullest rank.

    Args:
        chunks: the stage's.
        both_contiguous: symmetric codes of FP8 weights are stored once per direction (the native backend).
    """
    found = StateBytes()
    owned: list[list[int]] = []  # masters and moments by rank of the stage
    for chunk in chunks:
        for buffer in of_chunk_buffers(settings, chunk, plans):
            found += _buffer(settings, buffer, plans, both_contiguous)
            owned = _sum_by_rank(owned, _optimizer(settings, buffer))
        if chunk.last:
            found += StateBytes(kept_codes=output_codes(settings.model, plans, both_contiguous))
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


def _buffer(settings: Settings, buffer: Buffer, plans: Plans, both_contiguous: bool) -> StateBytes:
    model, distributed = settings.model, settings.optimizer.use_distributed_optimizer
    shared = shares_gradient_buffer(settings)
    parameters = [parameter for bucket in buffer.buckets for parameter, _ in bucket.places]
    size = model.activation_bytes
    weights = codes = 0
    if not buffer.fp8:
        weights = size * (buffer.size if distributed else buffer.values)
        if distributed and shared:
            # Megatron-Core gathers these through an extra buffer (parameters are not views of param_data).
            weights = size * (buffer.values + buffer.size)
        codes = sum(kept_codes(settings, parameter, plans, both_contiguous) for parameter in parameters)
    else:
        for parameter in parameters:
            stored = stored_weight(plans.of(_site(parameter), parameter.layer), *_matrix(parameter))
            weights += stored.total
        if distributed and not shared:
            weights += buffer.size - buffer.values  # padding of the buffer with the codes
    return StateBytes(weights, codes, 4 * buffer.size)


def kept_codes(settings: Settings, parameter: Parameter, plans: Plans, both_contiguous: bool = False) -> int:
    """Bytes of the cached codes of a BF16 weight: quantised once an iteration, reused for all its microbatches."""
    if parameter.site is None:
        return 0
    plan = plans.of(parameter.site, parameter.layer)
    if plan.precision == "bf16" or lives_as_fp8(settings, plan):
        return 0
    matrix, keeps = _matrix(parameter), settings.model.fp8_keep_columnwise
    return stored_weight(plan, *matrix, both_contiguous=both_contiguous, keeps_columnwise=keeps).total


def output_codes(model: Model, plans: Plans, both_contiguous: bool = False) -> int:
    """Bytes of the cached codes of the output projection's weight, which stays BF16, tied or not."""
    if plans.output.precision == "bf16":
        return 0
    rows = model.padded_vocabulary // model.tensor_model_parallel_size
    return stored_weight(
        plans.output,
        rows,
        model.hidden_size,
        both_contiguous=both_contiguous,
        keeps_columnwise=model.fp8_keep_columnwise,
    ).total


def _optimizer(settings: Settings, buffer: Buffer) -> list[list[int]]:
    """(masters, moments) of each rank of the buffer's group."""
    if settings.optimizer.use_distributed_optimizer:
        pieces: list[list[int]] = [[] for _ in range(buffer.ranks)]
        for bucket in buffer.buckets:
            for rank, more in enumerate(bucket.pieces(buffer.ranks)):
                pieces[rank] += more
    else:
        pieces = [[p.size for bucket in buffer.buckets for p, _ in bucket.places]] * buffer.ranks
    half = settings.model.bf16 or settings.model.fp16
    compact = settings.optimizer.state_dtype == "fp8"
    return [
        [4 * sum(sizes) if half else 0, sum(map(moments, sizes)) if compact else 8 * sum(sizes)]
        for sizes in pieces
    ]


def moments(size: int) -> int:
    """Bytes of compact moments of ``size`` values: E4M3 and float16, each with a float32 scale per 128 values."""
    return 3 * size + 8 * -(-size // _BLOCK)


def _site(parameter: Parameter) -> str:
    assert parameter.site is not None
    return parameter.site


def _matrix(parameter: Parameter) -> tuple[int, int]:
    n, k = parameter.shape
    return n, k

"""The cached codes of a site's weight, valid until the weight may have changed.

Optimizers that write through flat buffers do not change a tensor's version. So each optimizer step increments the state's
``weight_generation``.

A forward saves a stamp of the weight if it keeps no columnwise side for dgrad, or if that may be replaced before
backward (compiled code, offloading, another forward). The stamp has the weight's generation and the delayed scale,
with which backward quantizes the weight again. Rejected: one more argument of the backward operator. Graphs that
torch.compile cached on disk under an earlier version of this package would not pass it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..backends.base import CastRequest
from ..files.terminal import warn_user
from ..kernels.cast_dispatch import block_amaxes, in_memory
from ..numerics.scaling import compute_scale
from ..params.fp8_parameter import Fp8Parameter
from ..params.frozen_parameter import columnwise_codes
from ..quantizer import CastJob, Casts, Quantizer, measure
from ..state.arena import Slot
from ..state.fp8_state import Fp8State
from ..tensor import Float8Tensor, Operand, Sides

_DELAYED, _EVALUATED = 1, 2  # a stamp's flags


@dataclass
class CachedWeight:
    """A quantized weight.

    Attributes:
        version: the source weight's ``WeightCache.version``.
        recorded: the weight's amax is in its slots.
        scale: float32 [], the delayed scale that was used; None: the weight's own.
        for_evaluation: evaluation made it; its scale may differ from training's.
    """

    version: tuple[Any, ...]
    recorded: bool
    scale: torch.Tensor | None
    quantized: Float8Tensor
    for_evaluation: bool


class WeightCache:
    """Quantizes a site's weight and caches the result.

    Args:
        casts: the weight's quantizers.
        state: of the model: which iteration it is, and whether weights may be cached.

    Attributes:
        casts, state: as given.
        evaluation_casts: its quantizers in evaluation: ``casts``, unless code other than training may write it.
        entry: the cached weight.
        before: the cache that this one replaces. Its entry is freed when this one gets codes.
    """

    def __init__(self, casts: Casts, state: Fp8State):
        self.casts, self.state = casts, state
        self.evaluation_casts = casts
        self.entry: CachedWeight | None = None
        self.before: WeightCache | None = None
        self._memory: StorageWeakRef | None = None
        """Storage of the cached weight; the reference keeps its number from being reused."""
        self._observed = -1, False
        """When the weight was last recorded without a cast: the iteration, and whether a CUDA graph captured it."""
        shared = casts.shared
        # Codes that serve both directions, one a transposed view of the other, are one copy anyway.
        one_copy = shared is not None and (
            shared.rule.granularity.symmetric and shared.backend.turns_codes(shared.rule)
        )
        self._requantizes_in_backward = shared is not None and not one_copy and not state.keeps_columnwise

    def check_scale_in_evaluation(
        self, weight_facts: Callable[[], WeightFacts], warn: Callable[[str], Any]
    ) -> None:
        """Makes evaluation check that the delayed scale fits, because code other than training may write the weight."""
        self.evaluation_casts = evaluation_casts(self.casts, weight_facts, warn)

    # A weight is quantized once an iteration if the state ``keeps_weights``, else at each call. ``prepare`` returns it if
    # no cast is needed, else the cast; the caller passes the cast's result to ``take``.

    def prepare(
        self, weight: torch.Tensor, *, fresh: bool, training: bool, record: bool
    ) -> Sides | list[CastJob]:
        """Returns both sides of the weight: [N, K], and [K, N] columnwise. If they must be cast first, returns the casts.

        A side is quantized, or plain if its GEMM runs in high precision. The columnwise side is None if backward
        quantizes it anew. An FP8 parameter is not cast. Its amax is recorded once an iteration, as that of a cast.

        Args:
            fresh: ignore the cache (Megatron's is_first_microbatch).
            training: the layer's mode, which chooses the casts.
            record: record the amax.
        """
        if isinstance(weight, Fp8Parameter):
            assert self.casts.rowwise is not None, (
                "a weight that the plan keeps in high precision was made FP8"
            )
            if record and self._first_this_iteration():
                weight.record()
                if (observer := self.state.observer) is not None:
                    observer.stored(weight.quantizer.slot.name, weight)
            rowwise, columnwise = weight.quantized.sides
            return Sides(rowwise, columnwise if self.casts.shared is not None else None)
        casts = self.casts if training else self.evaluation_casts
        if casts.rowwise is casts.columnwise is None:
            return Sides(weight, weight.t())
        entry = None if fresh or not self.state.keeps_weights else self.entry
        # An inference tensor has no version, so a write would go unnoticed.
        if entry is not None and not weight.is_inference() and entry.version == self.version(weight):
            if record and not entry.recorded:
                self.record(measure(weight))
            return self._sides(weight, entry.quantized)
        casts = casts._replace(columnwise=None) if self._requantizes_in_backward else casts
        return [CastJob(*part, weight, record) for part in casts.parts()]

    def take(
        self, weight: torch.Tensor, made: Sequence[Float8Tensor], *, training: bool, record: bool, keep: bool
    ) -> Sides:
        """Returns the results of the casts that ``prepare`` returned, in ``prepare``'s form.

        Caches it if the state ``keeps_weights``; ``keep``: for backward, which an operator needs.
        """
        if self.before is not None:
            self.before.forget()
        quantized = made[0]
        if len(made) == 2:
            quantized = Float8Tensor(made[0].rowwise, made[1].columnwise, weight.dtype)
        self.entry = None
        if keep or self.state.keeps_weights:
            if self._memory is None or self._memory.cdata != _storage_number(weight):
                self._memory = StorageWeakRef(weight.untyped_storage())
            casts = self.casts if training else self.evaluation_casts
            scale = None if casts.columnwise is None else casts.columnwise.delayed_scale()
            version, evaluation = self.version(weight), casts is not self.casts
            self.entry = CachedWeight(version, record, scale, quantized, evaluation)
        return self._sides(weight, quantized)

    def _sides(self, weight: torch.Tensor, made: Float8Tensor) -> Sides:
        if self._requantizes_in_backward:
            return Sides(made.rowwise, None)
        return Sides(made.rowwise or weight, weight.t() if made.columnwise is None else made.columnwise)

    def record(self, measured: torch.Tensor) -> None:
        """Records the amax and non-finite count (float32 [2]) of a weight whose cast did not record them.

        Records a cached weight once.
        """
        entry = self.entry
        if entry is not None and entry.recorded:
            return
        for quantizer in self.casts.quantizers:
            quantizer.record(measured[0], measured[1])
        if entry is not None:
            entry.recorded = True

    def undo_record(self) -> None:
        """Lets the next call record the weight again, after its slots were restored."""
        self._observed = -1, False
        if self.entry is not None:
            self.entry.recorded = False

    def frozen_quantizer(self) -> Quantizer | None:
        """The rowwise quantizer of a weight that training no longer writes: a delayed scale is used if it fits."""
        casts = self.evaluation_casts
        return (evaluation_casts(casts) if casts is self.casts else casts).rowwise

    def observe(self, weight: torch.Tensor) -> None:
        """Record the weight's amax, once an iteration, without a cast."""
        if self._first_this_iteration():
            self.casts.observe(weight)

    def forget(self) -> None:
        """Empties the cache, because another weight took this one's place."""
        self.entry = None

    def _first_this_iteration(self) -> bool:
        now = self.state.iteration, self.state.capturing  # a replay records for itself
        first, self._observed = self._observed != now, now
        return first

    def version(self, weight: torch.Tensor, weight_generation: int | None = None) -> tuple[Any, ...]:
        """The weight's memory and layout, and its version now, or in an earlier generation.

        The storage is identified by its number, which is unique while the cache refers to it. An address would be reused
        once freed. Codes made in the capture of a CUDA graph exist at its replay only, so they are another version.
        """
        generation = self.state.weight_generation if weight_generation is None else weight_generation
        captured = self.state.capturing or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        version = 0 if weight.is_inference() else weight._version
        lies = weight.dtype, weight.shape, weight.stride(), weight.storage_offset()
        return generation, _storage_number(weight), *lies, version, captured


def _storage_number(tensor: torch.Tensor) -> int:
    number: int = torch._C._storage_id(tensor)  # type: ignore[attr-defined]
    return number


class Stamp(NamedTuple):
    """How a forward quantized a weight.

    Attributes:
        generation: the weight_generation.
        training: the layer's mode.
        scale: float32 [], the delayed scale; None: current scaling.
    """

    generation: int
    training: bool
    scale: torch.Tensor | None

    @staticmethod
    def of(weights: WeightCache, training: bool) -> Stamp:
        """The stamp of a forward that just quantized the weight."""
        entry = weights.entry
        quantizer = (weights.casts if training else weights.evaluation_casts).columnwise
        if entry is not None:
            scale = entry.scale
        else:  # that of the cast just made
            scale = None if quantizer is None else quantizer.delayed_scale()
        return Stamp(weights.state.weight_generation, training, scale)


def stamps_to_tensors(stamps: Sequence[Stamp], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stamps as tensors that a graph can save: int64 [sites, 2] on the CPU, generations and flags; float32 [sites], the
    delayed scales, or 1."""
    facts = [
        [generation, _DELAYED * (scale is not None) + _EVALUATED * (not training)]
        for generation, training, scale in stamps
    ]
    one = torch.ones((), dtype=torch.float32, device=device)
    scales = torch.stack([one if stamp.scale is None else stamp.scale for stamp in stamps])
    return torch.tensor(facts, dtype=torch.int64, device="cpu"), scales


def stamps_from_tensors(facts: torch.Tensor, scales: torch.Tensor) -> list[Stamp]:
    """The stamps of ``stamps_to_tensors``."""
    return [
        Stamp(generation, not flags & _EVALUATED, scale if flags & _DELAYED else None)
        for (generation, flags), scale in zip(facts.tolist(), scales, strict=True)
    ]


def columnwise_of(weights: WeightCache, weight: torch.Tensor, stamp: Stamp) -> Operand:
    """dgrad's operand [K, N] of the weight [N, K] whose forward has this stamp.

    Returns forward's codes while the site caches them. Otherwise quantizes the weight again, with the same bits: the
    state keeps no columnwise sides, ``fp8_step`` or another forward ran in between, or offloading returned the weight as
    another tensor. Of an FP8 parameter, whose forward used its rowwise codes, they follow from these.
    """
    quantizer, entry = weights.casts.columnwise, weights.entry
    if isinstance(weight, Fp8Parameter):
        return (
            weight.dequantize().t() if quantizer is None else columnwise_codes(weight, quantizer, stamp.scale)
        )
    if quantizer is None:
        return weight.t()
    evaluation = not stamp.training and weights.evaluation_casts is not weights.casts
    side = None
    if (
        entry is not None
        and entry.for_evaluation == evaluation
        and entry.version == weights.version(weight, stamp.generation)
    ):
        side = entry.quantized.columnwise
    side = side or quantizer.requantize(weight, "columnwise", stamp.scale).columnwise
    assert side is not None
    return side


# -------------------------------------------------------------------------------------------------- evaluation scale

# A delayed scale comes from the weights of earlier iterations. Weights written by other code, such as merged adapters and
# averages, may exceed it by far. Evaluation records nothing, so it would saturate them for ever. So evaluation measures
# the weight's amax before each cast. If it fits the scale, the cast uses the scale, with the training forward's bits.
# Otherwise the cast uses current scaling, as for a weight without a history. The choice is made on the device and not
# stored, so it is right after a write through ``.data``, in compiled code and in a CUDA graph.
#
# Training does not measure: the first forward saturates, its amax is recorded, and the next iteration's scale fits.
# Rejected: current scaling for every weight that exceeds its scale. Optimizers let many weights grow a little in each
# step, and evaluation would then not give the training forward's bytes.

STEPPED = 2.0
"""Factor by which a weight may exceed its scale if training may have written it."""

ROUNDED = 1 + 2.0**-7
"""Factor by which a weight may exceed its saved amax: its dtype may have changed, and BF16 rounds by half of this."""

_FLUSHED = 2.0**10
"""Largest factor between the current and the delayed scale: beyond it the weight's small values become zeros."""


class WeightFacts(NamedTuple):
    """Facts about a weight since its scale was computed.

    Attributes:
        limit: factor by which its amax may exceed the largest that fits the scale.
        amax: an amax beyond the scale may not exceed this: the weight's as training left it, if known.
        written: code other than training certainly wrote it.
        has_warned: whether the model's user was warned of such weights.
    """

    limit: float = STEPPED
    amax: float = math.inf
    written: bool = False
    has_warned: bool = False


class EvalWeightQuantizer(Quantizer):
    """A delayed weight's quantizer in evaluation. It uses current scaling if the delayed scale does not fit.

    Args:
        quantizer: training's.
        weight_facts: called at each cast.
        warn: called once if a scale did not fit and the host can see it without waiting for a device.

    Attributes:
        misfits: bool [], whether the delayed scale did not fit the last matrix; None: that was not checked.
    """

    def __init__(
        self, quantizer: Quantizer, weight_facts: Callable[[], WeightFacts], warn: Callable[[str], Any]
    ):
        super().__init__(quantizer.rule, quantizer.slot, quantizer.backend)
        self._weight_facts, self._warn = weight_facts, warn
        self.computes = False  # the matrix is read for its amax first
        self._used: torch.Tensor | None = None
        self.misfits: torch.Tensor | None = None

    def delayed_scale(self) -> torch.Tensor | None:
        """float32 [], the scale of its last cast; None if that was not delayed."""
        return self._used

    def request(self, job: CastJob) -> CastRequest:
        """The cast by the delayed scale if that fits, else by current scaling."""
        request = super().request(job)
        scale, self.misfits = request.scale, None
        if scale is not None:
            facts = self._weight_facts()
            scale, self.misfits = eval_scale(job.x, scale, self.slot, facts)
            if not facts.has_warned and _may_look(job.x, facts) and bool(self.misfits):
                self._warn(self.slot.name)
        self._used = scale
        return request._replace(scale=scale)


def eval_scale(
    x: torch.Tensor, delayed_scale: torch.Tensor, slot: Slot, facts: WeightFacts
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [], the scale to cast x by; bool [], whether it is x's own). Nothing is read back.

    Args:
        x: the weight. If it is all zeros or has an Inf, any scale fits.
        delayed_scale: float32 [].
        facts: by how much x may exceed it.
    """
    assert slot.delayed is not None
    amax = block_amaxes(in_memory(x).contiguous(), [(0, 0)])[0][0].view([])
    epsilon, margin = slot.delayed.amax_epsilon, slot.delayed.margin
    full = compute_scale(amax, slot.fmt, epsilon=epsilon)  # beyond this scale the largest value saturates
    own = compute_scale(amax, slot.fmt, margin=margin, epsilon=epsilon) if margin else full
    fits = delayed_scale <= full * facts.limit
    if facts.amax < math.inf:
        fits = (fits & (amax <= facts.amax * ROUNDED)) | (delayed_scale <= full)
    misfits = ~(fits & (own <= delayed_scale * _FLUSHED)) & (amax > 0) & amax.isfinite()
    return torch.where(misfits, own, delayed_scale), misfits


def evaluation_casts(
    casts: Casts,
    weight_facts: Callable[[], WeightFacts] = WeightFacts,
    warn: Callable[[str], Any] = lambda name: None,
) -> Casts:
    """The casts of a weight for evaluation; those that are not delayed are the same."""
    made: dict[Quantizer | None, Quantizer] = {
        quantizer: EvalWeightQuantizer(quantizer, weight_facts, warn)
        for quantizer in casts.quantizers
        if quantizer.slot.delayed is not None
    }
    return Casts(*(made.get(quantizer, quantizer) for quantizer in casts))


def untrained_quantizer(quantizer: Quantizer) -> Quantizer:
    """The quantizer of a weight that is no longer trained: no value written to it may saturate."""
    cast = evaluation_casts(Casts(quantizer, quantizer), lambda: WeightFacts(1.0)).rowwise
    assert cast is not None
    return cast


def warn_replaced_weight(name: str) -> None:
    """Warns that evaluation uses current scaling for the weight whose slot has this name."""
    warn_user(
        f"{name} was replaced since training gave it a scale, which does not fit it: evaluation scales such weights by"
        " their own largest magnitude, as training will from the iteration after its next"
    )


def _may_look(x: torch.Tensor, facts: WeightFacts) -> bool:
    """Whether the host may read the result for x: if that needs no wait, or if x was written."""
    if not x.is_cuda:
        return True
    return facts.written and not torch.cuda.is_current_stream_capturing()

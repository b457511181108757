"""The cached codes of a site's weight, valid until the weight may have changed.

Optimizers that write through flat buffers leave no trace in a tensor's version; whoever steps tells the state, whose
``weight_generation`` covers those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..numerics.rule import Direction
from ..params.fp8_parameter import Fp8Parameter
from ..quantizer import Casts, measure
from ..state.fp8_state import Fp8State
from ..tensor import Float8Tensor, Sides
from .eval_weight_scale import WeightFacts, fitted


class CachedWeight:
    """A quantised weight, the version of the weight that it was made of, and the delayed scale that was used, if any.

    Args:
        sides: gives the quantised weight.
        fitted: evaluation made it, whose scale may be another than training's.
    """

    def __init__(
        self,
        version: tuple[Any, ...],
        recorded: bool,
        scale: torch.Tensor | None,
        sides: Callable[[], Float8Tensor],
        *,
        fitted: bool = False,
    ):
        self.version, self.recorded, self.scale = version, recorded, scale
        self.made_by, self.fitted = sides, fitted

    @cached_property
    def quantized(self) -> Float8Tensor:
        """The quantised weight."""
        return self.made_by()


class WeightCache:
    """Quantises a site's weight and caches the result.

    Args:
        casts: the role's.
        state: of the model: which iteration it is, and whether weights may be kept.

    Attributes:
        casts, state: as given.
        evaluated_by: what quantises it in evaluation: ``casts``, unless others than the training may write it.
        held: what is kept.
    """

    def __init__(self, casts: Casts, state: Fp8State):
        self.casts, self.state = casts, state
        self.evaluated_by = casts
        self.held: CachedWeight | None = None
        self._memory: StorageWeakRef | None = None  # of what is kept, so that no other memory gets its number
        self._observed = -1  # the iteration in which the weight was recorded without a cast
        shared = casts.shared
        # Codes that serve both directions, one a transposed view of the other, are one copy anyway.
        self._may_make_again = shared is not None and not (
            shared.rule.granularity.symmetric and shared.backend.turns_codes(shared.rule)
        )

    def fit(self, known: Callable[[], WeightFacts], tell: Callable[[str], Any]) -> None:
        """Others than the training may write the weight: evaluation looks whether its delayed scale still fits."""
        self.evaluated_by = fitted(self.casts, known, tell)

    def casts_in(self, training: bool) -> Casts:
        """What quantises it."""
        return self.casts if training else self.evaluated_by

    def fits(self, training: bool) -> bool:
        """Whether a cast looks if its delayed scale fits, and may take another than training's."""
        return self.casts_in(training) is not self.casts

    @property
    def direction(self) -> Direction:
        """What a cast of the weight makes."""
        return "rowwise" if self._makes_again else "both"

    @property
    def _makes_again(self) -> bool:
        """Whether the columnwise side is made in each backward and not kept from the forward."""
        return self._may_make_again and not self.state.keeps_columnwise

    @property
    def kept(self) -> Float8Tensor | None:
        """The quantised weight that is held now."""
        return None if self.held is None else self.held.quantized

    def quantized(self, weight: torch.Tensor, *, fresh: bool, record: bool, training: bool = True) -> Sides:
        """The weight [N, K], and [K, N] columnwise: each quantised, or as it is where the plan has high precision.

        It is quantised once an iteration if the state ``keeps_weights``, else at each call. The columnwise side is None
        where backward makes it again (dgrad_weight.py).

        Args:
            fresh: quantise again whatever is kept (Megatron's is_first_microbatch).
            training: False in evaluation.

        A weight that lives as FP8 is used as it is; its amax counts once an iteration, as if it had been cast here.
        """
        sides = self.ready(weight, fresh=fresh, record=record)
        if sides is None:
            with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
                casts = self.casts_in(training)
                quantized = casts(weight, self.direction, record=record, for_product=True)
                sides = self.take(weight, quantized, record=record, training=training)
        return sides

    def ready(self, weight: torch.Tensor, *, fresh: bool, record: bool) -> Sides | None:
        """``quantized`` where that needs no cast, else None."""
        if isinstance(weight, Fp8Parameter):
            assert self.casts.rowwise is not None, (
                "a weight that the plan keeps in high precision was made FP8"
            )
            if record and self._first_this_iteration():
                weight.record()
                if (observer := self.state.observer) is not None:
                    observer.stored(weight.quantizer.slot.name, weight)
            return Sides(weight.quantized.rowwise, weight.quantized.columnwise)
        if self.casts.rowwise is self.casts.columnwise is None:
            return Sides(weight, weight.t())
        kept = self.serving(weight, fresh=fresh, record=record)
        return None if kept is None else self._sides(weight, kept)

    def take(self, weight: torch.Tensor, quantized: Float8Tensor, *, record: bool, training: bool) -> Sides:
        """Keep what ``casts_in`` just gave of the weight, in the direction that is asked for; as ``quantized``."""
        column, fitted = self.casts_in(training).columnwise, self.fits(training)
        scale = None if column is None else column.delayed_scale()
        kept = CachedWeight(self.version(weight), record, scale, lambda: quantized, fitted=fitted)
        return self._sides(weight, self.keep(weight, kept))

    def _sides(self, weight: torch.Tensor, kept: CachedWeight) -> Sides:
        made = kept.quantized
        if self._makes_again:
            return Sides(made.rowwise, None)
        return Sides(made.rowwise or weight, weight.t() if made.columnwise is None else made.columnwise)

    def serving(self, weight: torch.Tensor, *, fresh: bool, record: bool) -> CachedWeight | None:
        """What was kept, if it is of the weight as it is now and may serve; arguments as those of ``quantized``."""
        kept = self.held
        # Of a weight without a version nobody would notice that it was written.
        if kept is None or fresh or not self.state.keeps_weights or weight.is_inference():
            return None
        if kept.version != self.version(weight):
            return None
        if record and not kept.recorded:
            self.record(measure(weight))
        return kept

    def record(self, measured: torch.Tensor) -> None:
        """Record the amax and non-finite count (float32 [2]) of a weight whose cast recorded neither.

        A cached weight is recorded once.
        """
        kept = self.held
        if kept is not None and kept.recorded:
            return
        for quantizer in self.casts.quantizers:
            quantizer.record(measured[0], measured[1])
        if kept is not None:
            kept.recorded = True

    def recorded_nothing(self) -> None:
        """Let the next call record the weight again: its slots were restored."""
        self._observed = -1
        if self.held is not None:
            self.held.recorded = False

    def keep(self, weight: torch.Tensor, kept: CachedWeight) -> CachedWeight:
        """Keep what was just made of the weight."""
        if self._memory is None or self._memory.cdata != _storage_number(weight):
            self._memory = StorageWeakRef(weight.untyped_storage())
        self.held = kept
        return kept

    def observe(self, weight: torch.Tensor) -> None:
        """Record the weight's amax, once an iteration, without a cast."""
        if self._first_this_iteration():
            self.casts.observe(weight)

    def forget(self) -> None:
        """Drop what is kept: another weight took this one's place, or the next call will quantise anyway."""
        self.held = None

    def _first_this_iteration(self) -> bool:
        first, self._observed = self._observed != self.state.iteration, self.state.iteration
        return first

    def version(self, weight: torch.Tensor, weight_generation: int | None = None) -> tuple[Any, ...]:
        """The weight's memory, how it lies there, and what is known of writes to it (now, or in an earlier generation).

        The storage is named by its number, which no other has for as long as somebody refers to it, as the cache does:
        its address freed memory gives to another. Codes made in the capture of a CUDA graph exist at its replay only, so
        they are another version.
        """
        generation = self.state.weight_generation if weight_generation is None else weight_generation
        captured = self.state.capturing or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
        version = 0 if weight.is_inference() else weight._version
        lies = weight.dtype, weight.shape, weight.stride(), weight.storage_offset()
        return generation, _storage_number(weight), *lies, version, captured


def _storage_number(tensor: torch.Tensor) -> int:
    number: int = torch._C._storage_id(tensor)  # type: ignore[attr-defined]
    return number

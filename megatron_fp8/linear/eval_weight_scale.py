"""Evaluation scale of a delayed weight: the history's, or current where it was overwritten.

Delayed scaling knows a weight by the iterations that cast it. Weights that somebody puts there afterwards, such as
merged adapters and averages, may lie far beyond that scale, and evaluation, which records nothing, would saturate them
for ever. So evaluation looks at the weight's amax before it casts. Where that fits the scale, the scale is used, with
the training forward's bits; else the cast is that of a weight without a history, by its own amax. The choice is made on
the device and nothing is remembered: it is right for a weight that is written through ``.data``, in compiled code and in
a CUDA graph.

Training makes no such pass: the first forward saturates, its amax is recorded, and the next iteration's scale fits.
Rejected: to take the own scale whenever the weight outgrew the history's. Optimizers let many weights grow a little in
each step, and evaluation would then not give the training forward's bytes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..backends.base import Quantized
from ..kernels.cast_dispatch import block_amaxes, in_memory
from ..numerics.rule import Direction
from ..numerics.scaling import compute_scale
from ..quantizer import Casts, Quantizer
from ..state.arena import Slot

STEPPED = 2.0
"""How far beyond its scale a weight may be that the training itself may have written."""

ROUNDED = 1 + 2.0**-7
"""How much larger a weight may be than it was saved, whose dtype is another one now: BF16 rounds by half of that."""

_FLUSHED = 2.0**10
"""How much larger a weight's own scale may be: with one beyond it, the weight's small values become zeros."""


class WeightFacts(NamedTuple):
    """What is known of a weight since its last scale was made.

    Attributes:
        limit: how far its amax may lie beyond the scale.
        amax: and no larger it may be, if it lies beyond: what it was as training left it, where that is known.
        written: somebody other than the training wrote it, and that is certain.
        told: whether the model's user was told of such weights.
    """

    limit: float = STEPPED
    amax: float = math.inf
    written: bool = False
    told: bool = False


class EvalWeightQuantizer(Quantizer):
    """A delayed weight's quantizer in evaluation, which takes the weight's own scale where the history's does not fit.

    Args:
        quantizer: training's.
        known: asked at each cast.
        tell: called once a scale did not fit, as far as the host sees that without waiting for a device.

    Attributes:
        misfits: bool [], whether the last matrix was cast by a scale of its own since the history's did not fit; None: it
            was not asked.
    """

    def __init__(self, quantizer: Quantizer, known: Callable[[], WeightFacts], tell: Callable[[str], Any]):
        super().__init__(quantizer.rule, quantizer.slot, quantizer.backend)
        self._known, self._tell = known, tell
        self._used: torch.Tensor | None = None
        self.misfits: torch.Tensor | None = None

    @property
    def computes(self) -> bool:
        """Never: the matrix is read for its amax first."""
        return False

    def delayed_scale(self) -> torch.Tensor | None:
        """float32 [], the scale of its last cast; None if that had no history's."""
        return self._used

    def quantize(self, x: torch.Tensor, direction: Direction, **_: Any) -> Quantized:
        """x [rows, cols] by the history's scale where that fits, else by x's own."""
        self._used = scale = self._scale_of(x)
        done: Quantized = self.backend.quantize(x, self.rule, direction, scale=scale)
        self.slot.arena.counts.casts += 1
        return done

    def _scale_of(self, x: torch.Tensor) -> torch.Tensor | None:
        kept, self.misfits = self._current_scale(), None
        if kept is None:
            return None
        known = self._known()
        scale, self.misfits = eval_scale(x, kept, self.slot, known)
        if not known.told and _may_look(x, known) and bool(self.misfits):
            self._tell(self.slot.name)
        return scale


def eval_scale(
    x: torch.Tensor, kept: torch.Tensor, slot: Slot, known: WeightFacts
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 [], the scale to cast x by; bool [], whether it is x's own). Nothing is read back.

    Args:
        x: the weight. All zeros or with an Inf it says nothing of a scale, and fits any.
        kept: float32 [], the delayed scale.
        known: how far x may lie beyond it.
    """
    assert slot.delayed is not None
    amax = block_amaxes(in_memory(x).contiguous(), [(0, 0)])[0][0].view([])
    epsilon, margin = slot.delayed.amax_epsilon, slot.delayed.margin
    full = compute_scale(amax, slot.fmt, epsilon=epsilon)  # beyond this scale the largest value saturates
    own = compute_scale(amax, slot.fmt, margin=margin, epsilon=epsilon) if margin else full
    fits = kept <= full * known.limit
    if known.amax < math.inf:
        fits = (fits & (amax <= known.amax * ROUNDED)) | (kept <= full)
    misfits = ~(fits & (own <= kept * _FLUSHED)) & (amax > 0) & amax.isfinite()
    return torch.where(misfits, own, kept), misfits


def fitted(
    casts: Casts,
    known: Callable[[], WeightFacts] = WeightFacts,
    tell: Callable[[str], Any] = lambda name: None,
) -> Casts:
    """The casts of a weight for evaluation; those that are not delayed are the same."""
    made = {
        id(quantizer): EvalWeightQuantizer(quantizer, known, tell)
        for quantizer in casts.quantizers
        if quantizer.slot.delayed is not None
    }

    def of(quantizer: Quantizer | None) -> Quantizer | None:
        return made.get(id(quantizer), quantizer)

    return Casts(of(casts.rowwise), of(casts.columnwise))


def replaced_by(quantizer: Quantizer) -> Quantizer:
    """What casts a weight that no training writes any more: whatever is written there is not to be saturated."""
    cast = fitted(Casts(quantizer, quantizer), lambda: WeightFacts(1.0)).rowwise
    assert cast is not None
    return cast


def warn_of_replaced(name: str) -> None:
    """Say that a weight, whose slot has this name, is scaled by itself in evaluation."""
    warnings.warn(
        f"{name} was replaced since training gave it a scale, which does not fit it: evaluation scales such weights by"
        " their own largest magnitude, as training will from the iteration after its next",
        stacklevel=2,
    )


def _may_look(x: torch.Tensor, known: WeightFacts) -> bool:
    """Whether the host may read a verdict on x: where nobody waits for it, or where x was written."""
    if not x.is_cuda:
        return True
    return known.written and not torch.cuda.is_current_stream_capturing()

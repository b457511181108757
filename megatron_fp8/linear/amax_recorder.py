"""Records a linear's amaxes, non-finite values and GEMMs by the rules of ``state/iteration.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..params.fp8_parameter import Fp8Parameter
from ..quantizer import measure
from ..state.fp8_state import Fp8State
from ..state.iteration import LATER, NEVER, NOW, IterationCounts, in_backward
from .gemm_site import GemmSite
from .quantized_activation import QuantizedActivation

_restored: set[StorageWeakRef] = set()
"""Records already made: a second backward over a retained graph restores the same tensors."""


class DeferredRecord:
    """The record of an evaluation-mode forward, made once its backward runs.

    Attributes:
        measured: float32 [sites, 2, 2], ``measure`` of each site's input and weight.
        counts: the forward's GEMM and cast counts.
        after_step: an optimizer stepped before the forward, and nothing ended the iteration.
    """

    def __init__(self, measured: torch.Tensor, counts: IterationCounts, after_step: bool):
        self.measured, self.counts, self.after_step = measured, counts, after_step
        self._memory: StorageWeakRef | None = None
        self._done = False

    @classmethod
    def of(
        cls, sites: Sequence[GemmSite], inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> DeferredRecord:
        """Measures each site's input [..., K] and weight [N, K]; the caller sets ``counts`` after the forward."""
        measured = [_measure(x) for pair in zip(inputs, weights, strict=True) for x in pair]
        return cls(torch.stack(measured).view(-1, 2, 2), IterationCounts(), sites[0].state.must_end_first)

    def saved(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the record as tensors for a graph: ``measured``; counts and ``after_step``, int64 [7] on the CPU."""
        numbers = [*vars(self.counts).values(), int(self.after_step)]
        return self.measured, torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @classmethod
    def restored(cls, measured: torch.Tensor, numbers: torch.Tensor) -> DeferredRecord:
        """Rebuilds the record from ``saved``: measured float32 [sites, 2, 2], numbers int64 [7]."""
        *counts, after_step = numbers.tolist()
        record = cls(measured, IterationCounts(*counts), bool(after_step))
        record._memory = StorageWeakRef(numbers.untyped_storage())
        record._done = record._memory in _restored
        return record

    def record(self, sites: Sequence[GemmSite]) -> None:
        """Records the forward. Backward calls this; a second backward of the same forward records nothing.

        RuntimeError: an optimizer stepped before the forward, and nothing ended the iteration.
        """
        if self._done:
            return
        self._done = True
        if self._memory is not None:
            _restored.difference_update([memory for memory in _restored if memory.expired()])
            _restored.add(self._memory)
        state = sites[0].state
        if self.after_step and state.missing_end:
            raise RuntimeError(state.missing_end)
        state.counts.add(self.counts)
        for site, (of_input, of_weight) in zip(sites, self.measured, strict=True):
            for quantizer in site.casts["input"].quantizers:
                quantizer.record(of_input[0], of_input[1])
            site.weights.record(of_weight)


def _measure(x: torch.Tensor) -> torch.Tensor:
    """``measure`` of a tensor [..., K]: float32 [2].

    Quantised activations are decoded first; an FP8 parameter returns what its cast measured.
    """
    if isinstance(x, Fp8Parameter):
        return x.measured
    return measure(x.side.dequantize(torch.float32) if isinstance(x, QuantizedActivation) else x)


@contextmanager
def counted_forward(
    sites: Sequence[GemmSite],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    training: bool,
    when: str,
) -> Iterator[tuple[bool, DeferredRecord | None]]:
    """Context around the forward of a linear or of a layer's experts: counts its GEMMs and casts.

    Args:
        sites, inputs, weights: one per linear; inputs [..., K], weights [N, K].
        training: the layer's mode.
        when: when to record the forward: NOW, LATER or NEVER.

    Yields:
        Whether casts record in slots; the record for the backward, or None. Its counts are set on exit.
    """
    late = DeferredRecord.of(sites, inputs, weights) if when == LATER else None
    with _observed_once(sites, training, when) as record:
        sites[0].state.activity.awaits |= when != NEVER
        if training:
            yield record, None
            return
        with sites[0].state.uncounted() as counts:
            if late is not None:
                late.counts = counts
            yield record, late


@contextmanager
def _observed_once(sites: Sequence[GemmSite], training: bool, when: str) -> Iterator[bool]:
    """Yields whether casts record in slots. An observer sees each training forward once.

    It sees a training forward under no_grad and not its recomputation. Such a forward records in slots for the
    observer; this restores the slots on exit.
    """
    state, now = sites[0].state, when == NOW
    if state.observer is None:
        yield now
    elif in_backward():
        with state.unobserved():
            yield now
    elif (
        now or not training
    ):  # whether an evaluation's backward comes is not known yet: the observer skips it
        yield now
    else:
        slots = [
            q.slot for site in sites for role in ("input", "weight") for q in site.casts[role].quantizers
        ]
        rows = [slot.arena.rows[:, slot.index].clone() for slot in slots]
        try:
            yield True
        finally:
            for slot, before in zip(slots, rows, strict=True):
                slot.arena.rows[:, slot.index] = before
            for site in sites:
                site.weights.recorded_nothing()


def came_back(state: Fp8State) -> None:
    """Counts a backward that reached a site."""
    state.activity.backwards += 1

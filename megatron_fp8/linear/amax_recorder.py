"""Records a linear's amaxes, non-finite values and GEMMs by the rules of ``state/iteration.py``.

Linears that run in high precision are counted. Delayed scaling records their amaxes, too: its histories fill during
warm-up, so that scales exist when FP8 begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ..params.fp8_parameter import Fp8Parameter
from ..quantizer import measure
from ..state.fp8_state import Fp8State
from ..state.iteration import LATER, NEVER, NOW, IterationCounts, in_backward, record_time
from ..state.observer_protocol import LinearEvent
from .gemm_site import GemmSite
from .quantized_tokens import QuantizedTokens

_restored: set[StorageWeakRef] = set()
"""Records already made: a second backward over a retained graph restores the same tensors."""


class DeferredRecord:
    """What an evaluation-mode forward measured. Its backward records it; without a backward nothing is recorded.

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

    def to_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the record as tensors for a graph: ``measured``; counts and ``after_step``, int64 [7] on the CPU."""
        numbers = [*vars(self.counts).values(), int(self.after_step)]
        return self.measured, torch.tensor(numbers, dtype=torch.int64, device="cpu")

    @staticmethod
    def empty(x: torch.Tensor, sites: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialised tensors in the shapes of ``to_tensors`` for this many sites, on x's device (any shape)."""
        measured = x.new_empty((sites, 2, 2), dtype=torch.float32)
        return measured, torch.empty(7 if sites else 0, dtype=torch.int64, device="cpu")

    @classmethod
    def from_tensors(cls, measured: torch.Tensor, numbers: torch.Tensor) -> DeferredRecord:
        """Rebuilds the record from ``to_tensors``: measured float32 [sites, 2, 2], numbers int64 [7]."""
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
            for role, (amax, _) in (("input", of_input), ("weight", of_weight)):
                for quantizer in site.uncast.get(role, ()):
                    quantizer.record(amax, None)


def _measure(x: torch.Tensor) -> torch.Tensor:
    """``measure`` of a tensor [..., K]: float32 [2].

    Quantized activations are decoded first; an FP8 parameter returns what its cast measured.
    """
    if isinstance(x, Fp8Parameter):
        return x.measured
    return measure(x.side.dequantize(torch.float32) if isinstance(x, QuantizedTokens) else x)


@contextmanager
def count_forward(
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
    deferred = DeferredRecord.of(sites, inputs, weights) if when == LATER else None
    with _observed_once(sites, training, when) as record:
        sites[0].state.activity.awaits_backward |= when != NEVER
        if training:
            yield record, None
            return
        with sites[0].state.uncounted() as counts:
            if deferred is not None:
                deferred.counts = counts
            yield record, deferred


@contextmanager
def _observed_once(sites: Sequence[GemmSite], training: bool, when: str) -> Iterator[bool]:
    """Yields whether casts record in slots. An observer sees each training forward once.

    It sees a training forward under no_grad and not its recomputation. Such a forward records in slots for the
    observer; this restores the slots on exit.
    """
    state, now = sites[0].state, when == NOW
    if state.observer is not None and in_backward():
        with state.unobserved():
            yield now
        return
    # Whether an evaluation's backward comes is not known yet: the observer skips it.
    if state.observer is None or now or not training:
        yield now
        return
    slots = [
        q.slot
        for site in sites
        for role in ("input", "weight")
        for q in (*site.casts[role].quantizers, *site.uncast.get(role, ()))
    ]
    rows = [slot.arena.rows[:, slot.index].clone() for slot in slots]
    try:
        yield True
    finally:
        for slot, before in zip(slots, rows, strict=True):
            slot.arena.rows[:, slot.index] = before
        for site in sites:
            site.weights.undo_record()


def record_high_precision(
    x: torch.Tensor,
    weight: torch.Tensor,
    y: torch.Tensor,
    site: GemmSite,
    *,
    training: bool,
    observe: bool,
    shard: bool = False,
) -> torch.Tensor:
    """Count a linear that ran in high precision, tell the observer, and record amaxes.

    The observer does not hear of what is in evaluation, traced or transformed, or has no memory.

    Args:
        x, weight, y: y [..., N] = x [..., K] @ weight [N, K]^T.
        training: the layer's mode.
        observe: record amaxes; False where FP8 was switched off around the call.
        shard: x is this rank's tokens of a matrix that its tensor-parallel group gathers.

    Returns:
        y. Use this one: traced code drops the recording of an unused y.
    """
    count_linear(site.state, x, weight, y, training=training)
    observer = None if torch.compiler.is_compiling() or not training else site.state.observer
    has_values = not (x.is_meta or isinstance(x, FakeTensor))
    if observer is not None and has_values and torch._C._functorch.peek_interpreter_stack() is None:
        with _disable_current_modes():  # what keeps or counts operations has no business with an observer's
            observer.high_precision(LinearEvent(site.plan.name, x, weight, y, not in_backward(), shard))
    return observe_high_precision(x, weight, y, site, training=training) if observe else y


def count_linear(
    state: Fp8State,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    y: torch.Tensor,
    *,
    training: bool,
    kind: str = "hp_gemms",
) -> None:
    """Count a linear whose GEMMs no site multiplies: y [..., N] = x [..., K] @ weight^T, as 'hp_gemms' or 'fp8_gemms'.

    Traced code counts nothing, since torch.compile would guard on the numbers; it only sets ``activity.traced``.
    """
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled():
            state.activity.traced = True
        return
    gradients = int(x.requires_grad) + int(weight is not None and weight.requires_grad)

    def count(number: int) -> None:
        setattr(state.counts, kind, getattr(state.counts, kind) + number)

    if training:
        count(1)
    if y.requires_grad:

        def count_backward(_: torch.Tensor) -> Any:
            state.activity.backwards += 1
            count(gradients + (not training))

        y.register_hook(count_backward)


def observe_high_precision(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, site: GemmSite, *, training: bool
) -> torch.Tensor:
    """Record the amaxes of a linear that ran in high precision, for delayed scaling. Returns y [..., N], unchanged."""
    if not site.has_histories or record_time(training, y) == NEVER:
        return y
    if torch.compiler.is_compiling() or site.watched_forwards.as_operator(x, weight):
        from .compiled import traced_observation  # loads torch's compiler

        return traced_observation(x, weight, y, site, training=training)
    observe(site, x, weight, y, training=training)
    return y


def observe(
    site: GemmSite, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, training: bool
) -> None:
    """Record the amaxes of a linear that ran in high precision: y [..., N] = x [..., K] @ weight^T. No value changes.

    Those of x and, once an iteration, of the weight are recorded now, in evaluation mode once the backward comes; that of
    y's gradient when it comes.
    """
    amax = measure(x)[0]
    if training:
        observe_forward(site, amax, weight)
    if y.requires_grad:

        def arrived(dy: torch.Tensor) -> None:
            if not training:
                observe_forward(site, amax, weight)
            observe_backward(site, dy)

        y.register_hook(arrived)


def observe_forward(site: GemmSite, amax: torch.Tensor, weight: torch.Tensor) -> None:
    """Record the amax of the input, float32 [], and, once an iteration, that of the weight."""
    for quantizer in site.casts["input"].quantizers:
        if quantizer.slot.delayed is not None:
            quantizer.record(amax, None)
    site.weights.observe(weight)


def observe_backward(site: GemmSite, dy: torch.Tensor) -> None:
    """Record the amax of y's gradient."""
    site.casts["grad_output"].observe(dy.reshape(-1, dy.shape[-1]))

"""CUDA graphs: captures a training step with its FP8 update.

    for batch in first_batches:                  # delayed scaling: until every tensor has its scale
        train_eagerly(batch)
    graph, captured = torch.cuda.CUDAGraph(), CapturedStep(state)
    with torch.cuda.graph(graph), captured:      # in this order: leaving the inner one captures the update
        loss = loss_of(model(static_input))
        loss.backward()
    for batch in batches:
        static_input.copy_(batch)
        graph.replay()
        if not captured.replayed().nonfinite:    # waits for the GPU, as reading the loss would
            optimizer.step()

A replay runs kernels and no Python. So all of a step's decisions on the host must be the same in every replay: every
tensor has a scale (a first scale needs the host), scales are updated in each iteration (interval 1), no slot is
added, no phase in high precision is left, no random bits come from the host. ``CapturedStep`` refuses all else.
Tensors must also keep their memory: slots, scales, histories and their heads are updated in place.

A weight is quantized inside the graph, even if eager code has cached it: a replay must use the current weight. Codes
from a capture are not used outside, since a capture computes nothing.

Counters and the iteration are on the host: ``replayed`` advances them. A tensor, ``nonfinite``, also says whether to
skip the step: with an optimizer inside the graph, pass it as ``found_inf`` to one that takes it (torch's fused ones).

Rejected: doing this in ``finish_iteration`` when it detects a capture. Every replay would silently lose the host's
part of an iteration; the caller of a replay must call something.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .arena import Arena
from .fp8_state import Fp8State
from .iteration import IterationCounts

_MEASURED = ("last_amax", "last_nonfinite", "own_nonfinite", "own_damage")
"""Attributes of an arena that each replay overwrites."""


class CapturedStep:
    """One training step over these FP8 states, captured inside ``with captured:``. On a CPU the step runs once.

    Args:
        states: every state that the step's sites write to (for a Megatron-Core model:
            mcore.iteration.CapturedIteration).

    Raises:
        ValueError: a step over them cannot be captured; the message has the reason and the remedy.
    """

    def __init__(self, *states: Fp8State):
        for state in states:
            reason = capture_refusal(state)
            if reason is not None:
                raise ValueError(f"an FP8 training step cannot be captured as a CUDA graph: {reason}")
        self.states = states
        self.nonfinite = torch.zeros(0, dtype=torch.float32, device="cpu")
        self._counts: list[IterationCounts] = []
        self._arenas: list[tuple[Arena, torch.Tensor, dict[str, torch.Tensor]]] = []

    def __enter__(self) -> CapturedStep:
        for state in self.states:
            state.begin_capture()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                found = [arena.settle_unread() for state in self.states for arena in state.arenas]
                self.nonfinite = (
                    torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float32, device="cpu")
                )
                self._arenas = [
                    (arena, arena.rows, {name: getattr(arena, name) for name in _MEASURED})
                    for state in self.states
                    for arena in state.arenas
                ]
        finally:
            self._counts = [state.end_capture() for state in self.states]

    def replayed(self) -> IterationCounts:
        """Advances the host's state by one iteration. Call it after each ``graph.replay()``; waits for the GPU.

        Returns:
            The iteration's counts on this rank; nonfinite of all ranks of each reduction group.

        Raises:
            RuntimeError: since the capture FP8 tensors, an observer, a guard or phases were added. The replay did not see
                them: skip its step, and capture again or train eagerly.
        """
        self._check_for_changes()
        for arena, _, tensors in self._arenas:  # an eager iteration has set others
            vars(arena).update(tensors)
        total = IterationCounts()
        for state, counts in zip(self.states, self._counts, strict=True):
            nonfinite_here = 0
            for arena in state.arenas:
                nonfinite_here += int(arena.last_nonfinite.sum())
                arena.warm_up()
            total.add(state.count_replay(replace(counts, nonfinite=nonfinite_here)))
        return total

    def _check_for_changes(self) -> None:
        reasons = [_host_refusal(state) for state in self.states]
        known = {id(rows) for _, rows, _ in self._arenas}  # the graph still reads and writes these
        for arena in (arena for state in self.states for arena in state.arenas):
            if arena.slots and id(arena.rows) not in known:
                newest = arena.slots[-1].name
                reasons.append(
                    f"FP8 tensors were added since the capture, such as {newest}: capture it again"
                )
        for reason in filter(None, reasons):
            raise RuntimeError(f"the replay of a captured FP8 training step is void, skip its step: {reason}")


def capture_refusal(state: Fp8State) -> str | None:
    """Returns why a step over this state cannot be captured, None if it can."""
    reasons = (_host_refusal(state), *(arena.capture_refusal() for arena in state.arenas))
    return next((reason for reason in reasons if reason is not None), None)


def _host_refusal(state: Fp8State) -> str | None:
    """Returns what the host does in this state's iterations that a replay leaves out, None if nothing."""
    if not state.phases.trivial:
        return (
            "precision changes with the phases of the training (fp8_high_precision_warmup or _healing): set them to 0, or"
            " train eagerly"
        )
    if state.guard is not None:
        return "the guard changes the precision of sites on the host: switch it off, or train eagerly"
    if state.watcher is not None:
        return "an observer (telemetry) watches its casts, and a replay calls no observer: detach it first"
    return None

"""What an iteration records and counts, and when it ends.

An iteration is the time between two calls of ``fp8_step`` (or Megatron-Core's finalize_model_grads). What a call of a
linear records (amaxes and non-finite counts of its casts, its GEMMs and casts) depends on the call alone, never on
earlier calls:

    call                                       amaxes, non-finite values     GEMMs and casts
    forward in training mode, with gradients   at once                       at once
    forward in training mode, under no_grad    never                         at once
    forward in evaluation mode, with gradients when its backward runs        when its backward runs
    forward in evaluation mode, under no_grad  never                         never
    backward, whatever the mode of its forward at once                       at once

A recomputed forward is a forward with gradients. It records the same amaxes again, and the arena keeps the largest. A
forward that a hook runs inside a backward is a forward, too. Whether a backward is running changes nothing.

An optimizer's step ends an iteration only if it trains: something ran since the last end, and a backward reached the
model or some gradient is not zero. ``torch.distributed.checkpoint.state_dict`` steps a new optimizer with gradients
and learning rates of zero, to create its state: such a step ends nothing. An explicit ``fp8_step`` always ends the
iteration. Ranks decide together whether something ran: one rank's part of a sharded gradient may be zero or empty.

Rejected: recording each forward in its backward, whatever the mode. The health status would then miss a forward whose
backward fails. Rejected: identifying a recomputation by whether a backward is running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch.optim import Optimizer

NOW, LATER, NEVER = "now", "later", "never"


def record_time(training: bool, *inputs: torch.Tensor | None) -> str:
    """Returns when to record a forward of these inputs in this mode: NOW, LATER (in its backward) or NEVER."""
    if not torch.is_grad_enabled():
        return NEVER
    if training:
        return NOW
    return LATER if any(x is not None and x.requires_grad for x in inputs) else NEVER


def in_backward() -> bool:
    """Whether a backward is running in this thread. False while torch.compile traces."""
    return not torch.compiler.is_compiling() and backward_task() != -1


backward_task = torch._C._current_graph_task_id
"""Returns the id of the backward running in this thread, -1 if none. Not for traced code."""


def trains(optimizer: Optimizer, had_backward: bool) -> bool:
    """Whether the step that this optimizer just took trains the model.

    Args:
        had_backward: a backward reached the model since its last step. If not, or if all learning rates are 0, this
            reads the gradients and so waits for the device.
    """
    return (had_backward and _has_rate(optimizer)) or _has_gradient(optimizer)


def _has_rate(optimizer: Optimizer) -> bool:
    """Whether any learning rate is not 0. A rate on another device than the CPU counts as not 0, without a read."""
    rates = (group.get("lr", 1.0) for group in optimizer.param_groups)
    return any((isinstance(rate, torch.Tensor) and rate.device.type != "cpu") or rate != 0 for rate in rates)


def _has_gradient(optimizer: Optimizer) -> bool:
    """Whether any gradient of the optimizer's parameters is not zero on this rank. Stops at the first."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            values = local.coalesce().values() if local.is_sparse else local
            if bool(values.any()):
                return True
    return False


@dataclass
class IterationCounts:
    """The work of one iteration on this rank. ``nonfinite`` is the sum of the slots' counts after the reduction."""

    fp8_gemms: int = 0
    hp_gemms: int = 0
    casts: int = 0
    amax_collectives: int = 0
    scaling_collectives: int = 0
    nonfinite: int = 0

    def __bool__(self) -> bool:
        """Whether any count is not zero."""
        return any(vars(self).values())

    def add(self, other: IterationCounts) -> None:
        """Adds the other's counts to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Counter:
    """Selects the counts to which the calling thread adds: the iteration's, or separate ones.

    An evaluation in another thread than the training must not change the iteration's counts. Subtracting its counts
    afterwards would also subtract what the training counted meanwhile.

    Attributes:
        iteration: the counts of the current iteration.
    """

    def __init__(self) -> None:
        self.iteration = IterationCounts()
        self._thread = threading.local()

    def __reduce__(self) -> tuple[type[Counter], tuple[()]]:
        """Copies and pickles start with new counts."""
        return Counter, ()

    @property
    def current(self) -> IterationCounts:
        """The counts of the calling thread."""
        own: IterationCounts | None = getattr(self._thread, "counts", None)
        return self.iteration if own is None else own

    @contextmanager
    def separate(self, counts: IterationCounts) -> Iterator[None]:
        """Inside, the calling thread adds to these counts."""
        outer = getattr(self._thread, "counts", None)
        self._thread.counts = counts
        try:
            yield
        finally:
            self._thread.counts = outer

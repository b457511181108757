"""fp8_step: ends an iteration with one collective.

Rejected: updating at the exit of a context, or in the backward of the first or last layer. Gradient
accumulation, repeated calls of a module and recomputation do each of these several times in one iteration.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..files.argument_check import check_optimizer
from ..files.terminal import warn_user
from ..state.collectives import checked_group
from ..state.iteration import IterationCounts, in_backward, trains
from .linear_usage_check import warn_replaced
from .module_lookup import fp8_linears, groups_of

families_of = groups_of
"""Earlier name, used in old documentation."""


def fp8_step(model: torch.nn.Module, *, group: Any = None) -> IterationCounts:
    """Finish an iteration: reduce amaxes and NaN/Inf counts over all ranks, update scales and histories,
    reset the counts.

    Call it once an iteration, after the last backward, whatever the number of forwards; before or after
    ``optimizer.step()``. Before is better: ``nonfinite`` in the result shows whether to skip this step.

    Args:
        model: a model with FP8 linears; may be wrapped by DistributedDataParallel, fully_shard or
            torch.compile.
        group: the ranks that train this model; None: all of torch.distributed, if initialised. Collective:
            one all-reduce for the whole model, whatever its size.

    Returns:
        Counts of this rank's iteration: fp8_gemms, hp_gemms, casts, amax_collectives; and nonfinite, the
            number of NaN and Inf that were cast, the same on all ranks.

    Raises:
        ValueError: the model has no FP8 linear, or ``group`` is no process group.
        RuntimeError: ranks have different FP8 linears.
    """
    return _end_iteration(model, checked_group(group), ran=True)


def _end_iteration(model: torch.nn.Module, group: Any, *, ran: bool) -> IterationCounts:
    """``fp8_step``. ``ran`` False: nothing trained here, and the iteration ends only if it did on another rank."""
    if group is None and dist.is_initialized():  # checked here: conversion may precede init_process_group
        group = dist.group.WORLD
    total = IterationCounts()
    found = fp8_linears(model).values()
    for fp8_group in groups_of(model):
        warn_replaced(fp8_group, found)
        counts = fp8_group.finish_iteration(group, ran)
        if counts.fp8_gemms:
            fp8_group.unused.look(fp8_group)
        total.add(counts)
    return total


def register_fp8_step(optimizer: Any, model: torch.nn.Module, *, group: Any = None) -> RemovableHandle:
    """Call ``fp8_step(model)`` after every ``optimizer.step()`` that trains.

    A step trains if the model ran since the last ``fp8_step``, and a backward reached it or some gradient is
    not zero (state/iteration.py). Other steps exist: torch.distributed.checkpoint calls step to create
    optimizer state. fp8_step runs at the end of step, because a closure given to ``optimizer.step(closure)``
    runs the model inside; the several calls by LBFGS form one iteration. Repeated registration for the same
    model has no effect. A step that a gradient scaler skips does not call the hook, and the Inf that caused
    the skip would dominate the next iteration's amax: with a scaler, call ``fp8_step`` yourself. If several
    optimizers train one model, register it with one that steps in every iteration; if they alternate, with
    each.

    Args:
        optimizer: a torch optimizer, or a wrapper with an ``.optimizer`` (accelerate, Lightning). Copies and
            pickles of an optimizer lose their hooks: register those again.

    Returns:
        A handle; ``handle.remove()`` unregisters.

    Raises ValueError: the model has no FP8 linear; the optimizer is not a torch optimizer, or another
    model's. The optimizer's step raises RuntimeError if it is called inside a backward.
    """
    fp8_linears(model)
    checked_group(group)
    stepping = _optimizer_with_hooks(optimizer)
    check_optimizer(optimizer, model)
    hooks = stepping._optimizer_step_post_hooks
    for key, hook in list(hooks.items()):
        if isinstance(hook, _EndOfIteration) and hook.model is model:
            del hooks[key]
    return stepping.register_step_post_hook(_EndOfIteration(model, group))


class _EndOfIteration:
    """Post-step hook of an optimizer."""

    def __init__(self, model: torch.nn.Module, group: Any):
        self.model, self.group = model, group
        self.said = False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_nested_step(optimizer):
            return
        if in_backward():
            raise RuntimeError(
                "register_fp8_step: the optimizer steps inside a backward, where the iteration is not over yet: call"
                " fp8_step(model) after the backward, and do not register"
            )
        states = [state for group in groups_of(self.model) for state in group.states.values()]
        had_backward = any(state.had_backward for state in states)
        trained = trains(optimizer, had_backward)
        if not (trained or had_backward or any(state.activity.awaits_backward for state in states)):
            return
        # A rank without forward or backward still joins the collective of the other ranks.
        ran = trained and any(state.ran for state in states)
        nonfinite = _end_iteration(self.model, self.group, ran=ran).nonfinite
        if nonfinite and not self.said:  # an overflow step that a scaler skipped left the weights alone
            self.said = _warn_nonfinite_weight(self.model, nonfinite)


def _warn_nonfinite_weight(model: torch.nn.Module, nonfinite: int) -> bool:
    """Warn of the first weight with NaN or Inf, after a step that was not skipped."""
    for name, parameter in model.named_parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.is_floating_point() and not bool(local.isfinite().all()):
            warn_user(
                f"{nonfinite} of the values that FP8 linears cast in this iteration were NaN or Inf, and the optimizer"
                f" stepped: {name} is no longer finite, nor will the loss be. Fp8Trainer and LossScaler skip such steps;"
                " or call fp8_step(model) before optimizer.step(), and step only if its .nonfinite is 0"
            )
            return True
    return False


def _is_nested_step(optimizer: Optimizer) -> bool:
    """Whether the hook runs for the ``super().step()`` inside an optimizer's step.

    torch wraps the step of each class, so hooks of a subclass that calls super().step() run twice. Detected
    from the stack: a counter of begun steps would stay wrong after a closure that raises.
    """
    frame = sys._getframe(2)  # torch's wrapper, which calls the hook
    wrapper, outer = frame.f_code, frame.f_back
    while outer is not None:
        if outer.f_code is wrapper and outer.f_locals.get("self") is optimizer:
            return True
        outer = outer.f_back
    return False


def _optimizer_with_hooks(optimizer: Any) -> Optimizer:
    """The innermost torch optimizer. Wrappers may subclass Optimizer without hooks."""
    inner = optimizer
    while not (isinstance(inner, Optimizer) and "_optimizer_step_post_hooks" in vars(inner)):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise ValueError(
                f"register_fp8_step({type(optimizer).__name__}): it is no torch.optim.Optimizer and holds none as"
                " .optimizer; call fp8_step(model) once an iteration, before its step()"
            )
    return inner

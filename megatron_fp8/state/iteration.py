"""Which calls belong to an iteration, and when it is over.

An iteration is what happens between two ends of iterations (``fp8_step``, Megatron-Core's finalize_model_grads). What a
call of a linear adds to it (the amax and the non-finite values of what it casts, its GEMMs and casts) depends on the call
alone, never on what came before it:

    call                                       amaxes, non-finite values     GEMMs and casts
    forward in training mode, with gradients   at once                       at once
    forward in training mode, under no_grad    never                         at once
    forward in evaluation mode, with gradients when its backward comes       when its backward comes
    forward in evaluation mode, under no_grad  never                         never
    backward, whatever the mode of its forward at once                       at once

A recomputed forward is a forward with gradients. What it records once more are the same amaxes, of which the arena keeps
the largest. A forward that a hook runs inside a backward is a forward, too. Whether a backward runs decides nothing.

An optimizer's step ends an iteration only if it trains: something ran since the last end, and a backward came through it
or some gradient is not zero. ``torch.distributed.checkpoint.state_dict`` steps a new optimizer with gradients and rates
of zero, to make its state: such a step ends nothing. An explicit ``fp8_step`` always ends the iteration. Ranks decide
together, where something ran: the part of a sharded gradient that one of them holds may be zero or empty.

Rejected: to record each forward when its backward comes, whatever the mode. The verdict on health would then miss a
forward whose backward fails. Rejected: to tell a recomputation from a new forward by whether a backward is running.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

NOW, LATER, NEVER = "now", "later", "never"


def recorded(training: bool, *inputs: torch.Tensor | None) -> str:
    """When to record a forward of these inputs in this mode: NOW, LATER (in its backward) or NEVER."""
    if not torch.is_grad_enabled():
        return NEVER
    if training:
        return NOW
    return LATER if any(x is not None and x.requires_grad for x in inputs) else NEVER


def in_backward() -> bool:
    """Whether a backward is running in this thread. False while torch.compile traces."""
    return not torch.compiler.is_compiling() and backward_task() != -1


def backward_task() -> int:
    """The number of the backward that runs in this thread, -1 if none does. Not to be called in traced code."""
    return torch._C._current_graph_task_id()


def trains(optimizer: Optimizer, came_back: bool) -> bool:
    """Whether the step that this optimizer just took trains the model.

    Args:
        came_back: a backward reached the model since its last step. Else, and if all learning rates are 0, gradients are
            read, which waits for the device.
    """
    return (came_back and _has_rate(optimizer)) or _has_gradient(optimizer)


def _has_rate(optimizer: Optimizer) -> bool:
    """Whether any learning rate is not 0. One that lies on a device counts as such, unread."""
    rates = (group.get("lr", 1.0) for group in optimizer.param_groups)
    return any((isinstance(rate, torch.Tensor) and rate.device.type != "cpu") or rate != 0 for rate in rates)


def _has_gradient(optimizer: Optimizer) -> bool:
    """Whether any gradient that the optimizer steps with is not zero, of what this rank holds. Stops at the first."""
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

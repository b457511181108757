"""The end of differentiation: a backward whose result cannot be differentiated again says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

_NO_SECOND = (
    "no second derivative: gradients of FP8 layers, and of what stores FP8, have none. For a loss that contains gradients"
    " (create_graph=True) switch FP8 off around the forward"
)
_NO_BATCHES = (
    "gradients of FP8 layers cannot be batched (is_grads_batched, jacobian with vectorize=True): call backward for"
    " each"
)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd function, outermost but for staticmethod: differentiating it is a RuntimeError.

    torch's ``once_differentiable`` is not enough. It raises only where the incoming gradient itself requires a gradient.
    That of a sum is a constant, but what the backward multiplies it by depends on weights: a gradient penalty would lack
    that part without a word. And a second derivative by certain inputs (``hessian``) would be zeros, where the way to
    them does not lead past the error.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        return guard(backward, ctx, *grads)

    return guarded


def guard(backward: Callable[..., Any], ctx: Any, *grads: torch.Tensor) -> Any:
    """backward(ctx, *grads), whose result has no derivative. RuntimeError where gradients come in a batch.

    Nothing is changed by it but where gradients are recorded (create_graph=True) or batched.
    """
    if any(is_batchedtensor(grad) or is_legacy_batchedtensor(grad) for grad in grads):
        raise RuntimeError(_NO_BATCHES)
    with torch.no_grad():
        found = backward(ctx, *grads)
    if not torch.is_grad_enabled():
        return found
    outputs = [None if x is None else x.detach() for x in (found if isinstance(found, tuple) else (found,))]
    sources = [*_leaves_behind(ctx), *(grad for grad in grads if grad.requires_grad)]
    refuse: Any = torch._C._functions.DelayedError(_NO_SECOND.encode(), len(outputs) + len(sources))
    return refuse(*outputs, *sources)[: len(outputs)]


def _leaves_behind(node: Any) -> list[torch.Tensor]:
    """The leaves that a function's inputs were computed from."""
    leaves, met, ahead = [], {node}, [node]
    while ahead:
        for function, _ in ahead.pop().next_functions:
            if function is None or function in met:
                continue
            met.add(function)
            ahead.append(function)
            if hasattr(function, "variable"):  # what accumulates a leaf's gradient
                leaves.append(function.variable)
    return leaves

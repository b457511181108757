"""Guard that rejects second derivatives and batched gradients of FP8 backwards."""

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
    """Decorates an autograd function's backward, inside staticmethod: differentiating it raises RuntimeError.

    torch's ``once_differentiable`` is not enough: it raises only if the incoming gradient itself requires a gradient. The
    gradient of a sum is a constant, but backward multiplies it by weights: a gradient penalty would silently lack that
    part. A second derivative by some inputs (``hessian``) would be zeros, since its graph misses the error.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        return guard(backward, ctx, *grads)

    return guarded


def guard(backward: Callable[..., Any], ctx: Any, *grads: torch.Tensor) -> Any:
    """Returns backward(ctx, *grads), for grads of any shape, as tensors without a second derivative.

    RuntimeError if the gradients are batched. Only create_graph=True and batched gradients are affected.
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
    """The leaf tensors, of any shape, that a function's inputs depend on."""
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

"""Operands saved for backward by autograd functions; a guard against second derivatives.

Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks: offloading, recomputation, compression, a user's own)
run between forward and backward. Autograd does not check what they return. Codes may return with other strides. With
another shape C would read out of bounds; with another dtype it would read wrong values. So shapes, dtypes and devices
are checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from ..params.fp8_parameter import Fp8Parameter
from ..tensor import Operand, QuantizedSide
from .weight_cache import Stamp

Facts = tuple[torch.Size, torch.dtype, torch.device] | None
"""Shape, dtype and device that a restored tensor must have; None for None."""


class StampedWeight(NamedTuple):
    """A weight [N, K] with its forward's stamp, from which ``columnwise_of`` makes dgrad's operand in backward."""

    weight: torch.Tensor
    stamp: Stamp


Saved = Operand | StampedWeight | None


def save(ctx: Any, operands: Sequence[Saved]) -> None:
    """Saves the operands' tensors by ``ctx.save_for_backward``; ``restore`` checks them and returns the operands."""
    tensors: list[torch.Tensor | None] = []
    ctx.saved_as = []  # each operand's attributes other than tensors
    for operand in operands:
        if isinstance(operand, QuantizedSide):
            side = operand
            tensors += side.codes, side.scale_inv, side.tensor_amax
            names = "granularity", "pow2", "finite", "tiled", "padding", "hadamard"
            ctx.saved_as.append({name: getattr(side, name) for name in names})
        elif isinstance(operand, StampedWeight) and isinstance(operand.weight, Fp8Parameter):
            ctx.saved_as.append(operand)  # a hook would see the dequantized weight
        elif isinstance(operand, StampedWeight):
            tensors += operand.weight, operand.stamp.scale
            ctx.saved_as.append(operand.stamp._replace(scale=None))
        else:
            tensors.append(operand)
            ctx.saved_as.append(None)
    ctx.saved_facts = [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    ctx.save_for_backward(*tensors)


def restore(ctx: Any, name: str) -> list[Any]:
    """Returns the operands of ``save``. Raises ValueError, which names the layer, unless each tensor has the saved shape,
    dtype and device. Values and strides are not checked."""
    tensors = ctx.saved_tensors
    for x, wanted in zip(tensors, ctx.saved_facts, strict=True):
        found = None if x is None else (x.shape, x.dtype, x.device)
        if found != wanted:
            raise ValueError(
                f"{name}: {_described(wanted)} was saved for backward, and {_described(found)} came back: an unpack hook"
                " of torch.autograd.graph.saved_tensors_hooks has to give back the same shape and dtype on the same"
                " device"
            )
    operands: list[Saved] = []
    following = iter(tensors)
    for saved_as in ctx.saved_as:
        if saved_as is None:
            operands.append(next(following))
        elif isinstance(saved_as, StampedWeight):
            operands.append(saved_as)
        elif isinstance(saved_as, Stamp):
            weight, scale = next(following), next(following)
            operands.append(StampedWeight(weight, saved_as._replace(scale=scale)))
        else:
            codes, scale_inv, amax = next(following), next(following), next(following)
            operands.append(QuantizedSide(codes, scale_inv, tensor_amax=amax, **saved_as))
    return operands


def _described(facts: Facts) -> str:
    if facts is None:
        return "nothing"
    shape, dtype, device = facts
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


# ------------------------------------------------------------------------------------------------ second derivatives

_NO_SECOND = (
    "no second derivative: gradients of FP8 layers, and of what stores FP8, have none. For a loss that contains gradients"
    " (create_graph=True) switch FP8 off around the forward"
)
_NO_BATCHES = (
    "gradients of FP8 layers cannot be batched (is_grads_batched, jacobian with vectorize=True): call backward for"
    " each"
)


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates an autograd function's backward, inside staticmethod: differentiating it raises RuntimeError, and so do
    batched gradients.

    torch's ``once_differentiable`` is not enough: it raises only if the incoming gradient itself requires a gradient. The
    gradient of a sum is a constant, but backward multiplies it by weights: a gradient penalty would silently lack that
    part. A second derivative by some inputs (``hessian``) would be zeros, since its graph misses the error.
    """

    @functools.wraps(backward)
    def guarded(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return backward(ctx, *grads)
        for grad in grads:
            if is_batchedtensor(grad) or is_legacy_batchedtensor(grad):
                raise RuntimeError(_NO_BATCHES)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        outputs = [
            None if x is None else x.detach() for x in (found if isinstance(found, tuple) else (found,))
        ]
        sources = [*_leaves_behind(ctx), *(grad for grad in grads if grad.requires_grad)]
        refuse: Any = torch._C._functions.DelayedError(_NO_SECOND.encode(), len(outputs) + len(sources))
        return refuse(*outputs, *sources)[: len(outputs)]

    return guarded


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

"""Observes gradients of linears in high precision through autograd hooks.

A site with an FP8 GEMM computes all three products itself and passes them to observers. A linear in the
model's own dtype is torch's or Megatron-Core's: here the autograd node that computes the gradients of x and
weight is found behind its output and gets a hook. No tensor is stored for that.

Rejected: a hook on x. It sees the sum over all consumers of x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

_FARTHEST = 6
"""Nodes between a linear's output and its operands: views, a transposition, the product."""

Shown = Callable[[torch.Tensor], None]


def show_gradients(y: torch.Tensor, operands: list[tuple[torch.Tensor, Shown]]) -> None:
    """Call each operand's function with the gradient from this product, once per backward.

    Args:
        y: output of a linear.
        operands: (tensor, function) pairs of its inputs. Tensors without a gradient, or not found behind y,
            are skipped.
    """
    if y.grad_fn is None:
        return
    callbacks = {}
    for operand, shown in operands:
        if operand.requires_grad:
            edge = get_gradient_edge(operand)
            callbacks[edge.node, edge.output_nr] = shown
    for node in _nodes_between(y.grad_fn, {node for node, _ in callbacks}):
        found = [
            (place, callbacks[edge]) for place, edge in enumerate(node.next_functions) if edge in callbacks
        ]
        if found:
            node.register_hook(_gradient_hook(found))


def _gradient_hook(found: list[tuple[int, Shown]]) -> Callable[[Any, Any], None]:
    def show(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
        for place, shown in found:
            if (gradient := gradients[place]) is not None:
                shown(gradient)

    return show


def _nodes_between(first: Any, ends: set[Any]) -> Iterator[Any]:
    """Graph nodes from ``first`` back to ``ends``, excluding ``ends``."""
    visited, layer = {first}, [first]
    for _ in range(_FARTHEST):
        next_layer = []
        for node in layer:
            yield node
            for before, _ in node.next_functions:
                if before is not None and before not in visited and before not in ends:
                    visited.add(before)
                    next_layer.append(before)
        layer = next_layer

"""Gradients of linears in high precision, from autograd's nodes.

A site with an FP8 GEMM multiplies all three products itself and shows them. One that runs in the model's own dtype is
torch's or Megatron-Core's linear: the node that gives x and weight their gradients is looked up behind its output, and
told to show what it gives. No tensor is kept for that.

Rejected: a hook on x itself. It sees the sum over all that read x.
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
    """Call each operand's function with the gradient that this product gives it, when it does: once a backward.

    Args:
        y: what a linear has just given.
        operands: what it was computed of. Left out are those without a gradient, and those not found behind y.
    """
    if y.grad_fn is None:
        return
    wanted = {}
    for operand, shown in operands:
        if operand.requires_grad:
            edge = get_gradient_edge(operand)
            wanted[edge.node, edge.output_nr] = shown
    for node in _behind(y.grad_fn, {node for node, _ in wanted}):
        found = [(place, wanted[edge]) for place, edge in enumerate(node.next_functions) if edge in wanted]
        if found:
            node.register_hook(_showing(found))


def _showing(found: list[tuple[int, Shown]]) -> Callable[[Any, Any], None]:
    def show(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
        for place, shown in found:
            if (gradient := gradients[place]) is not None:
                shown(gradient)

    return show


def _behind(first: Any, ends: set[Any]) -> Iterator[Any]:
    """The nodes from ``first`` back to ``ends``, which are not among them."""
    met, layer = {first}, [first]
    for _ in range(_FARTHEST):
        ahead = []
        for node in layer:
            yield node
            for before, _ in node.next_functions:
                if before is not None and before not in met and before not in ends:
                    met.add(before)
                    ahead.append(before)
        layer = ahead

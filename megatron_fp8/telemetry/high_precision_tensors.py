"""Tensors that no cast shows: gradients of high-precision linears, and values of FP8 weights.

A site with an FP8 GEMM computes all three products itself and passes them to observers. A linear in the
model's own dtype is torch's or Megatron-Core's: here the autograd node that computes the gradients of x and
weight is found behind its output and gets a hook. No tensor is stored for that.
Rejected: a hook on x. It sees the sum over all consumers of x.

Statistics of an FP8 parameter need the values that its codes were cast from. The parameter does not have them; the
optimizer does, in float32. If the optimizer is sharded, each rank measures its own flat range, and the ranges add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

from ..numerics.rule import Granularity
from ..params.fp8_parameter import Fp8Parameter
from ..tensor import Float8Tensor, QuantizedSide

_FARTHEST = 6
"""Nodes between a linear's output and its operands: views, a transposition, the product."""

Receiver = Callable[[torch.Tensor], None]


def observe_gradients(y: torch.Tensor, operands: list[tuple[torch.Tensor, Receiver]]) -> None:
    """Call each operand's function with the gradient from this product, once per backward.

    Args:
        y: output of a linear.
        operands: (tensor, function) pairs of its inputs. Tensors without a gradient, or not found behind y,
            are skipped.
    """
    if y.grad_fn is None:
        return
    callbacks = {}
    for operand, receive in operands:
        if operand.requires_grad:
            edge = get_gradient_edge(operand)
            callbacks[edge.node, edge.output_nr] = receive
    for node in _nodes_between(y.grad_fn, {node for node, _ in callbacks}):
        found = [
            (place, callbacks[edge]) for place, edge in enumerate(node.next_functions) if edge in callbacks
        ]
        if found:
            node.register_hook(_gradient_hook(found))


def _gradient_hook(found: list[tuple[int, Receiver]]) -> Callable[[Any, Any], None]:
    def hook(gradients: tuple[torch.Tensor | None, ...], _: Any) -> None:
        for place, receive in found:
            if (gradient := gradients[place]) is not None:
                receive(gradient)

    return hook


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


class WeightValues(NamedTuple):
    """This rank's data of an FP8 parameter.

    Attributes:
        values: in the weight's nominal dtype: [rows, cols], or [1, n] for a flat range.
        codes: quantized values; None if their source values are unknown, and for a range of an NVFP4 weight.
        whole: every rank with the weight has all of it, so only one counts.
    """

    values: torch.Tensor
    codes: Float8Tensor | None
    whole: bool


def weight_values(weight: Fp8Parameter, *, columnwise: bool) -> WeightValues:
    """This rank's values and codes; empty values if other ranks own them.

    ``columnwise``: include columnwise codes of a flat range.

    Without a master (weights gathered as codes by FSDP) the values are the dequantized codes.
    """
    if weight.piece is None or weight.piece[1] - weight.piece[0] == weight.numel():
        master = weight.master
        if master is None:
            return WeightValues(weight.dequantize(), None, True)
        return WeightValues(
            master.detach().to(weight.dtype).view(weight.shape), weight.quantized, weight.piece is None
        )
    start, stop = weight.piece
    master = weight.master
    if start == stop or master is None:
        return WeightValues(torch.empty(1, 0, dtype=weight.dtype, device=weight.device), None, False)
    row, column = weight.quantized.sides
    assert row is not None and column is not None
    if row.tensor_amax is not None:  # two codes a byte: a range of elements has no codes of its own
        return WeightValues(master.detach().to(weight.dtype).view(1, -1), None, False)
    rowwise = _piece(row, start, stop, by_column=False)
    turned = _columnwise(_piece(column, start, stop, by_column=True)) if columnwise else None
    values = master.detach().to(weight.dtype).view(1, -1)
    return WeightValues(values, Float8Tensor(rowwise, turned, weight.dtype), False)


def _piece(side: QuantizedSide, start: int, stop: int, *, by_column: bool) -> QuantizedSide:
    """A flat range of the weight's elements as one row, with a scale per element, or one for all."""
    codes = side.codes.t() if by_column else side.codes
    codes = codes.reshape(1, -1)[:, start:stop]
    if side.granularity.is_tensor:
        return replace(side, codes=codes)
    scale = side.expanded_scale_inv().expand(side.codes.shape)
    scale = (scale.t() if by_column else scale).reshape(1, -1)[:, start:stop]
    return QuantizedSide(codes, scale, Granularity(1, 1), side.pow2, side.finite)


def _columnwise(side: QuantizedSide) -> QuantizedSide:
    """The same elements as a columnwise side: [n, 1]."""
    scale = side.scale_inv if side.granularity.is_tensor else side.scale_inv.t()
    return replace(side, codes=side.codes.t(), scale_inv=scale)

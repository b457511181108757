"""Patches by which Megatron-Core's token dispatchers send codes (`moe_fp8_dispatch`).

Dispatchers move rows with torch operations, which QuantizedTokens implements, and with three collectives, which would
send dequantized values. Those are replaced where dispatchers look them up: rows in codes are sent as bytes, in
forward (dispatch) or in backward (the gradient of combine), and everything else by the original calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from ...linear.quantized_tokens import QuantizedTokens
from ...linear.saved_operands import first_derivative_only
from .patching import PatchList

_WHY = "tokens and gradients in FP8 are sent as bytes"
patches = PatchList("megatron.core.transformer.moe")


@patches.wrap("token_dispatcher.all_to_all", _WHY)
def all_to_all_of_rows(
    original: Callable[..., Any],
    group: Any,
    input_: Any,
    output_split_sizes_: Any = None,
    input_split_sizes: Any = None,
) -> Any:
    """all_to_all, forward and backward, of rows in codes too."""
    return _send_rows(
        input_,
        lambda rows: original(group, rows, output_split_sizes_, input_split_sizes),
        lambda rows: original(group, rows, input_split_sizes, output_split_sizes_),
    )


@patches.wrap("token_dispatcher.gather_from_sequence_parallel_region", _WHY)
def gather_of_rows(
    original: Callable[..., Any],
    input_: Any,
    tensor_parallel_output_grad: bool = True,
    group: Any = None,
    output_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """gather_from_sequence_parallel_region of rows in codes too; their gradients are summed as before."""

    def forward(rows: Any) -> Any:
        return original(rows, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)

    if not isinstance(input_, QuantizedTokens):
        return forward(input_)
    assert tensor_parallel_output_grad, "dispatchers sum the gradients of what they gather"

    def backward(rows: Any) -> Any:
        return reduce_scatter_to_sequence_parallel_region(rows, group, output_split_sizes, use_global_buffer)

    return _send_rows(input_, forward, backward)


@patches.wrap("token_dispatcher.reduce_scatter_to_sequence_parallel_region", _WHY)
def reduce_scatter_of_rows(
    original: Callable[..., Any],
    input_: Any,
    group: Any = None,
    input_split_sizes: Any = None,
    use_global_buffer: bool = False,
) -> Any:
    """reduce_scatter_to_sequence_parallel_region, whose gradient may be in codes."""
    return _send_rows(
        input_,
        lambda rows: original(rows, group, input_split_sizes, use_global_buffer),
        lambda rows: gather_from_sequence_parallel_region(
            rows, True, group, input_split_sizes, use_global_buffer
        ),
    )


@patches.wrap(
    "experts.SequentialMLP._pad_tensor_for_quantization",
    "tokens in FP8 are not joined with zeros: casts and products here take any number of tokens",
)
def padding_of_values(original: Callable[..., Any], self: Any, hidden: Any, probs: Any) -> Any:
    """SequentialMLP._pad_tensor_for_quantization, which does not pad tokens in codes."""
    return (hidden, probs) if isinstance(hidden, QuantizedTokens) else original(self, hidden, probs)


_Send = Callable[[torch.Tensor], torch.Tensor]


def _send_rows(rows: torch.Tensor, forward: _Send, backward: _Send) -> Any:
    """Sends rows by ``forward``, and their gradients by ``backward``."""
    if not torch.is_grad_enabled() or not rows.requires_grad:
        return _apply(rows, forward)
    return _SendRows.apply(rows, forward, backward)


def _apply(rows: torch.Tensor, send: _Send) -> torch.Tensor:
    return rows.sent_by(send) if isinstance(rows, QuantizedTokens) else send(rows)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: _Send, send_back: _Send) -> torch.Tensor:
        ctx.send_back = send_back
        return _apply(rows, send)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _apply(grad, ctx.send_back), None, None

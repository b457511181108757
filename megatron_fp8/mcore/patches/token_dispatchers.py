"""Patches by which Megatron-Core's token dispatchers send codes (`moe_fp8_dispatch`).

Dispatchers move rows with torch operations, which QuantizedActivation implements, and with three collectives, which would
send dequantized values. Those are replaced where dispatchers look them up: rows in codes are sent as bytes, in
forward (dispatch) or in backward (the gradient of combine), and everything else by the original calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...linear.quantized_activation import QuantizedActivation
from ...linear.saved_operands import first_derivative_only
from .patching import Patch

_MOE = "megatron.core.transformer.moe"
_DISPATCHERS = f"{_MOE}.token_dispatcher"
_WHY = "tokens and gradients in FP8 are sent as bytes"


def patches() -> list[Patch]:
    """Returns the patches for moe_fp8_dispatch."""
    from megatron.core.transformer.moe import token_dispatcher

    gather = token_dispatcher.gather_from_sequence_parallel_region
    reduce_scatter = token_dispatcher.reduce_scatter_to_sequence_parallel_region
    return [
        Patch(_DISPATCHERS, "all_to_all", all_to_all_of_rows, _WHY, wrap=True),
        Patch(
            _DISPATCHERS,
            "gather_from_sequence_parallel_region",
            functools.partial(gather_of_rows, reduce_scatter=reduce_scatter),
            _WHY,
            wrap=True,
        ),
        Patch(
            _DISPATCHERS,
            "reduce_scatter_to_sequence_parallel_region",
            functools.partial(reduce_scatter_of_rows, gather=gather),
            _WHY,
            wrap=True,
        ),
        Patch(
            f"{_MOE}.experts.SequentialMLP",
            "_pad_tensor_for_quantization",
            padding_of_values,
            "tokens in FP8 are not joined with zeros: casts and products here take any number of tokens",
            wrap=True,
        ),
    ]


def all_to_all_of_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps all_to_all, forward and backward, for rows in codes too."""

    @functools.wraps(original)
    def all_to_all(
        group: Any, input_: Any, output_split_sizes_: Any = None, input_split_sizes: Any = None
    ) -> Any:
        def forward(rows: Any) -> Any:
            return original(group, rows, output_split_sizes_, input_split_sizes)

        def backward(rows: Any) -> Any:
            return original(group, rows, input_split_sizes, output_split_sizes_)

        return _send_rows(input_, forward, backward)

    return all_to_all


def gather_of_rows(original: Callable[..., Any], reduce_scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps gather_from_sequence_parallel_region for rows in codes too; their gradients are summed as before."""

    @functools.wraps(original)
    def gather_from_sequence_parallel_region(
        input_: Any,
        tensor_parallel_output_grad: bool = True,
        group: Any = None,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> Any:
        def forward(rows: Any) -> Any:
            return original(rows, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)

        if not isinstance(input_, QuantizedActivation):
            return forward(input_)
        assert tensor_parallel_output_grad, "dispatchers sum the gradients of what they gather"
        return _send_rows(
            input_, forward, lambda rows: reduce_scatter(rows, group, output_split_sizes, use_global_buffer)
        )

    return gather_from_sequence_parallel_region


def reduce_scatter_of_rows(original: Callable[..., Any], gather: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps reduce_scatter_to_sequence_parallel_region, whose gradient may be in codes."""

    @functools.wraps(original)
    def reduce_scatter_to_sequence_parallel_region(
        input_: Any, group: Any = None, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        def backward(rows: Any) -> Any:
            return gather(rows, True, group, input_split_sizes, use_global_buffer)

        return _send_rows(
            input_, lambda rows: original(rows, group, input_split_sizes, use_global_buffer), backward
        )

    return reduce_scatter_to_sequence_parallel_region


def padding_of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps SequentialMLP._pad_tensor_for_quantization: does not pad tokens in codes."""

    @functools.wraps(original)
    def _pad_tensor_for_quantization(self: Any, hidden: Any, probs: Any) -> Any:
        return (hidden, probs) if isinstance(hidden, QuantizedActivation) else original(self, hidden, probs)

    return _pad_tensor_for_quantization


_Send = Callable[[torch.Tensor], torch.Tensor]


def _send_rows(rows: torch.Tensor, forward: _Send, backward: _Send) -> Any:
    """Sends rows by ``there``, and their gradients by ``back``."""
    if not torch.is_grad_enabled() or not rows.requires_grad:
        return _apply(rows, forward)
    return _SendRows.apply(rows, forward, backward)


def _apply(rows: torch.Tensor, send: _Send) -> torch.Tensor:
    return rows.sent_by(send) if isinstance(rows, QuantizedActivation) else send(rows)


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: _Send, back: _Send) -> torch.Tensor:
        ctx.back = back
        return _apply(rows, there)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _apply(grad, ctx.back), None, None

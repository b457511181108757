"""The linear layer and a layer's experts: the autograd function, and how a call runs.

linear_ops.py computes; this file is its autograd function. Saved for backward: the input's columnwise codes (one byte
a value, and scales) and the weight's, not BF16. Its GEMMs (GemmSite) and its communication (a TensorParallel) are
arguments. Rejected: forty separate arguments, as in similar functions of other packages.

A call: ``fp8_linear`` or ``grouped_linear`` -> ``_run`` checks it -> ``_run_eager`` decides what is recorded ->
``_LinearFunction`` calls ``forward`` and ``backward`` of linear_ops.py. While torch.compile traces, or a dispatch mode is
on, ``_run`` calls the same two functions as opaque operators (compiled.py). Rejected: operators in eager mode as well.
For a small linear, torch's dispatcher takes longer than the autograd function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ..params.fp8_parameter import Fp8Parameter
from ..plan.autocast_state import without_autocast
from ..state.iteration import NOW, record_time
from .amax_recorder import count_forward
from .gemm_site import GemmSite
from .linear_ops import backward, for_gradient, forward
from .operands import Call
from .quantized_tokens import QuantizedTokens
from .saved_operands import StampedWeight, first_derivative_only, restore, save
from .tensor_parallel import ALONE, TensorParallel
from .weight_cache import Stamp, columnwise_of

Tokens = Sequence[int] | torch.Tensor
"""Each expert's number of tokens: integers, or an integer tensor [experts]. The host reads it, so best on the CPU."""


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: GemmSite,
    tp: TensorParallel = ALONE,
    *,
    training: bool = True,
    fresh_weight: bool = False,
    save_original_input: bool = False,
) -> torch.Tensor:
    """y = x @ weight^T + bias with the GEMMs of ``site``.

    Args:
        x: [..., K]; leading dimensions are tokens. With column and sequence parallelism: this rank's tokens.
            QuantizedTokens are not quantized again.
        weight: [N, K], this rank's part. If it has ``main_grad``, wgrad (float32) is added to it and the autograd
            gradient is an uninitialised dummy, as Megatron-Core's DistributedDataParallel expects of a fused wgrad.
        bias: [N], added in float32 before the one rounding; its gradient is the float32 sum of dy, unquantized. None
            with row parallelism, where it belongs after the sum over ranks.
        site, tp: the GEMMs and the communication.
        training: the layer's mode. It decides what is recorded, counted, and when (state/iteration.py).
        fresh_weight: quantize the weight again even if this iteration has done so.
        save_original_input: save x for wgrad, and quantize it again there. For callers that recompute x anyway.

    Returns:
        [..., N] in x's dtype. NaN in x or weight gives NaN where it is multiplied; Inf saturates and is counted (under
        MX's largest scale the saturated value itself is beyond bfloat16).

    Raises:
        ValueError: x is sparse or has no dimension, its last one is not the weight's, or they are on different devices.
        RuntimeError: it is being exported or jit-traced, or transformed by torch.func.
    """
    assert bias is None or tp.kind != "row", (
        "each rank would add a row-parallel bias, and their sum would count it again"
    )
    return _run(x, (weight,), bias, None, Call((site,), training, (fresh_weight,), save_original_input, tp))


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tokens: Tokens,
    sites: Sequence[GemmSite],
    *,
    training: bool = True,
    fresh_weights: Sequence[bool] | None = None,
    save_original_input: bool = False,
) -> torch.Tensor:
    """y_e = x_e @ weight_e^T for every expert e, with the GEMMs of ``sites[e]``; the bits of ``fp8_linear`` of each.

    Args:
        x: [T, K], the tokens of all experts, expert by expert; QuantizedTokens are not quantized again.
        weights: [N, K] each; ``main_grad`` as in ``fp8_linear``.
        tokens: T_e, any of which may be 0. With a tensor torch.compile makes one graph for all numbers. One on a GPU is
            copied to the host, once a call.
        sites: the experts' GEMMs.
        training, save_original_input: as in ``fp8_linear``.
        fresh_weights: its fresh_weight, for each expert.

    Returns:
        [T, N] in x's dtype. NaN and Inf as in ``fp8_linear``; those of one expert stay in its rows.

    Raises:
        ValueError: tokens do not sum to T, x's last dimension is not the weights', they are on different
            devices, or lists differ in length.
        RuntimeError: it is being exported or jit-traced, or transformed by torch.func.
    """
    name = sites[0].plan.name if sites else "grouped_linear"
    if not len(weights) == len(tokens) == len(sites) > 0:
        raise ValueError(
            f"{name}: {len(weights)} weights, {len(tokens)} numbers of tokens and {len(sites)} sites: one of each for"
            " every expert is needed"
        )
    if x.ndim != 2 or any(weight.ndim != 2 or weight.shape != weights[0].shape for weight in weights):
        raise ValueError(
            f"{name}: input {tuple(x.shape)} and weights {sorted({tuple(w.shape) for w in weights})}: tokens [T, K] and"
            " weights that are all [N, K] are needed"
        )
    fresh = [False] * len(sites) if fresh_weights is None else fresh_weights
    return _run(x, weights, None, tokens, Call(sites, training, fresh, save_original_input))


# ------------------------------------------------------------------------------------------------------- how it runs


def _check(name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
    """Raises ValueError unless input, weights and bias have fitting shapes and one device."""
    if x.layout is not torch.strided:
        raise ValueError(
            f"{name}: an FP8 linear takes dense inputs, and this one's layout is {x.layout}: give x.to_dense(), or call"
            " the linear inside fp8_autocast(enabled=False)"
        )
    if x.ndim == 0:
        raise ValueError(
            f"{name}: the input is a number without dimensions, and [..., in_features] is needed: give x.reshape(1)"
        )
    device = x.device
    for weight in weights:
        if weight.device != device or (bias is not None and bias.device != device):
            beside = "" if bias is None else f" and its bias on {bias.device}"
            raise ValueError(
                f"{name}: the input is on {device}, the weight on {weight.device}{beside}: move the model or the input;"
                " weights on meta have no memory before to_empty"
            )
    if x.shape[-1] != weights[0].shape[1]:
        raise ValueError(
            f"{name}: input {tuple(x.shape)} does not fit weight {tuple(weights[0].shape)};"
            f" its last dimension must be {weights[0].shape[1]}"
        )


def _run(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    tokens: Tokens | None,
    call: Call,
) -> torch.Tensor:
    """Runs the call as an autograd function; under torch.compile and dispatch modes as one operator."""
    name, compiling = call.sites[0].plan.name, torch.compiler.is_compiling()
    _check(name, x, weights, bias)
    # Not is_exporting(): up to torch 2.12 Dynamo assumes that it is true.
    if torch.compiler._is_exporting_flag or (
        not compiling and (torch.jit.is_tracing() or torch._C._functorch.peek_interpreter_stack() is not None)
    ):
        _refuse_tracers(name)
    as_operator = compiling or call.sites[0].watched_forwards.as_operator(x, *weights)
    if not as_operator:
        return _run_eager(x, weights, bias, tokens, call)
    from .compiled import break_graph, traced_linear  # loads torch's compiler

    # No operator takes these.
    if isinstance(x, QuantizedTokens) or any(isinstance(weight, Fp8Parameter) for weight in weights):
        if compiling:
            return break_graph(_run_eager, x, weights, bias, tokens, call)
        with _disable_current_modes():
            return _run_eager(x, weights, bias, tokens, call)
    return traced_linear(x, weights, bias, tokens, call)


def _refuse_tracers(name: str) -> None:
    """Raises RuntimeError: torch.export or torch.jit.trace makes a program of the call, or torch.func transforms it."""
    if torch.compiler._is_exporting_flag:
        raise RuntimeError(
            f"{name}: torch.export (torch.onnx and pipelining's pipeline() use it) makes a program that"
            " outlives the model, and FP8 state cannot go along: export inside fp8_autocast(enabled=False), or after"
            " convert_from_fp8(model); for pipelines make each PipelineStage of a converted module"
        )
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"{name}: torch.jit.trace does not see through an FP8 linear: use torch.compile, or trace inside"
            " fp8_autocast(enabled=False)"
        )
    raise RuntimeError(
        f"{name}: the transforms of torch.func (grad, vmap, jvp) do not see through an FP8 linear: use"
        " loss.backward() and batched inputs, or call it inside fp8_autocast(enabled=False)"
    )


def _run_eager(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    tokens: Tokens | None,
    call: Call,
) -> torch.Tensor:
    """Runs the call as an autograd function. The layer's mode decides what is recorded and counted, and when."""
    site = call.sites[0]
    if tokens is not None:
        numbers = on_host(tokens)
        check_numbers(site.plan.name, numbers, len(x))
        call = call._replace(tokens=numbers)
    when, with_gradients = record_time(call.training, x, bias, *weights), torch.is_grad_enabled()
    recording: Any
    if when == NOW and site.state.observer is None:  # count_forward's result, without its overhead
        site.state.activity.awaits_backward = True
        recording = nullcontext((True, None))
    else:
        recording = count_forward(call.sites, call.split(x), weights, training=call.training, when=when)
    with recording as (record, deferred):
        call = call._replace(record=record)
        if with_gradients or forward_ad._current_level >= 0:  # for its jvp
            call = call._replace(with_gradients=with_gradients, deferred=deferred)
            return _LinearFunction.apply(x, bias, call, *weights)
        return forward(x, weights, bias, call, [False] * len(weights)).y


def on_host(tokens: Tokens) -> list[int]:
    """The numbers of tokens as integers. Waits for a GPU's."""
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)


def check_numbers(name: str, tokens: Sequence[int], rows: int) -> None:
    """Raises ValueError, which names the site, unless these numbers of tokens are valid and sum to ``rows``."""
    if not all(isinstance(count, int) for count in tokens):
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} must be whole numbers: use an integer tensor, or its tolist()"
        )
    if min(tokens) < 0 or sum(tokens) != rows:
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} sum to {sum(tokens)}, and the input has {rows} rows: they say"
            " how many rows each expert has, in order"
        )


def group_where_possible(
    x: torch.Tensor,
    tokens: Tokens,
    joins: Sequence[bool],
    together: Callable[[list[int], torch.Tensor, Tokens], torch.Tensor],
    alone: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Multiplies all experts that allow it in one grouped call, and each other expert in a call of its own.

    Args:
        x: [T, K], the tokens of all experts, in order.
        tokens: T_e, each expert's number of tokens. Read only if some expert cannot join the grouped call.
        joins: for each expert, whether it can.
        together: (experts, their tokens concatenated, their numbers) -> their rows.
        alone: (expert, its tokens) -> its rows.

    Returns:
        [T, N], in the order of x.
    """
    if all(joins):
        return together(list(range(len(joins))), x, tokens)
    numbers = on_host(tokens)
    parts = x.split(numbers)
    done = {e: alone(e, parts[e]) for e, joined in enumerate(joins) if not joined}
    if these := [e for e, joined in enumerate(joins) if joined]:
        counts = [numbers[e] for e in these]
        made = together(these, torch.cat([parts[e] for e in these]), counts)
        done.update(zip(these, made.split(counts), strict=True))
    return torch.cat([done[e] for e in range(len(joins))])


# ---------------------------------------------------------------------------------------------------------- autograd


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, call: Call, *weights: torch.Tensor
    ) -> torch.Tensor:
        needs_dgrad, _, _, *needs_wgrad = [need and call.with_gradients for need in ctx.needs_input_grad]
        ctx.call, ctx.weights = call, [for_gradient(weight) for weight in weights]
        ctx.x_shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        done = forward(x, weights, bias, call, needs_wgrad)
        saved: list[Any] = [*done.x]
        for site, weight, sides in zip(call.sites, weights, done.weights, strict=True):
            operand: Any = sides.columnwise if needs_dgrad else None
            if needs_dgrad and operand is None:
                operand = StampedWeight(weight, Stamp.of(site.weights, call.training))
            saved.append(operand)
        save(ctx, saved)
        return done.y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        count = len(call.sites)
        call.sites[0].state.activity.backwards += 1
        if call.deferred is not None:
            call.deferred.record(call.sites)
        needs_dgrad, needs_dbias, _, *needs_wgrad = ctx.needs_input_grad
        operands = restore(ctx, call.sites[0].plan.name)
        dbias_dtype = ctx.bias_dtype if needs_dbias else None
        with without_autocast(grad_output.device):  # backward() may be called inside it
            saved_w = [
                columnwise_of(site.weights, *weight) if isinstance(weight, StampedWeight) else weight
                for site, weight in zip(call.sites, operands[count:], strict=True)
            ]
            done = backward(
                grad_output,
                operands[:count],
                saved_w,
                ctx.weights,
                call,
                needs_dgrad,
                needs_wgrad,
                dbias_dtype,
            )
        dx = done.dx if done.dx is None or done.dx.shape == ctx.x_shape else done.dx.view(ctx.x_shape)
        return dx, done.dbias, None, *done.dw

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """RuntimeError: there is none."""
        raise RuntimeError(
            "an FP8 linear has no forward-mode derivative: use backward(), or call it inside fp8_autocast(enabled=False)"
        )

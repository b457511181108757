"""The linear layer and a layer's experts: the autograd function, and how a call runs.

linear_ops.py computes; this file is its autograd function. Saved for backward: the input's columnwise codes (one byte
a value, and scales) and the weight's, not BF16. The function is told its GEMMs (GemmSite) and its communication (a
TensorParallel); it chooses neither. Rejected: the forty loose arguments and the flags for every kernel that such
functions grow elsewhere.

While torch.compile traces, or a dispatch mode is on, the same passes are called as two opaque operators (compiled.py).
Elsewhere they are called directly: for a small linear, torch's dispatcher would take longer than autograd's function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ..params.fp8_parameter import Fp8Parameter
from ..plan.autocast_state import without_autocast
from ..state.iteration import NOW, recorded
from ..tensor import Operand
from .amax_recorder import DeferredRecord, came_back, counted_forward
from .gemm_site import GemmSite
from .linear_ops import backward, for_gradient, forward
from .operands import Call
from .quantized_activation import QuantizedActivation
from .saved_operands import AGAIN, SavedOperand, first_derivative_only, given_back, save
from .tensor_parallel import ALONE, TensorParallel
from .weight_cache import columnwise_of, stamp_of

Tokens = Sequence[int] | torch.Tensor
"""Each expert's number of tokens: whole numbers, or an integer tensor [experts], best on the CPU: there it is read."""


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
            QuantizedActivation are multiplied as they are.
        weight: [N, K], this rank's part. If it has ``main_grad``, wgrad (float32) is added to it and the autograd
            gradient is an uninitialised dummy, as Megatron-Core's DistributedDataParallel expects of a fused wgrad.
        bias: [N], added in float32 before the one rounding; its gradient is the float32 sum of dy, unquantized. None
            with row parallelism, where it belongs after the sum over ranks.
        site, tp: the GEMMs and the communication.
        training: the layer's mode. What is recorded and counted, and when, says state/iteration.py.
        fresh_weight: quantize the weight again even if this iteration has done so.
        save_original_input: keep x itself for wgrad, and quantize it again there. For callers that recompute x anyway.

    Returns:
        [..., N] in x's dtype. NaN in x or weight gives NaN where it is multiplied; Inf saturates and is counted (under
        MX's largest scale the saturated value itself is beyond bfloat16).

    Raises:
        ValueError: x's last dimension is not the weight's, or they are on different devices.
        RuntimeError: it is being exported or jit-traced, or transformed by torch.func.
    """
    _check_devices(site, x, weight, bias)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{site.plan.name}: input {tuple(x.shape)} does not fit weight {tuple(weight.shape)};"
            f" its last dimension must be {weight.shape[1]}"
        )
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
        x: [T, K], the tokens of all experts, expert by expert; QuantizedActivation are multiplied as they are.
        weights: [N, K] each; one with ``main_grad`` has its gradient added there, as of ``fp8_linear``.
        tokens: T_e, any of which may be 0. Of a tensor torch.compile makes one graph for all numbers; one on the CPU is
            read without a wait, one on a GPU is copied from there first, once a call.
        sites: the experts' GEMMs.
        training, save_original_input: as of ``fp8_linear``.
        fresh_weights: as its fresh_weight, of each expert.

    Returns:
        [T, N] in x's dtype. NaN and Inf as of ``fp8_linear``: those of one expert stay in its rows.

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
    for site, weight in zip(sites, weights, strict=True):
        _check_devices(site, x, weight, None)
    if x.ndim != 2 or any(
        weight.ndim != 2 or weight.shape != weights[0].shape or weight.shape[1] != x.shape[1]
        for weight in weights
    ):
        raise ValueError(
            f"{name}: input {tuple(x.shape)} and weights {sorted({tuple(w.shape) for w in weights})}: tokens [T, K] and"
            " weights that are all [N, K] are needed"
        )
    fresh = [False] * len(sites) if fresh_weights is None else fresh_weights
    return _run(x, weights, None, tokens, Call(sites, training, fresh, save_original_input))


def _check_devices(site: GemmSite, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """ValueError unless input, weight and bias are on one device, as torch's linear asks."""
    device = x.device
    if weight.device == device and (bias is None or bias.device == device):
        return
    beside = "" if bias is None else f" and its bias on {bias.device}"
    raise ValueError(
        f"{site.plan.name}: the input is on {device}, the weight on {weight.device}{beside}: move the model or the input;"
        " weights on meta have no memory before to_empty"
    )


# ------------------------------------------------------------------------------------------------------- how it runs


def _run(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    tokens: Tokens | None,
    call: Call,
) -> torch.Tensor:
    """Runs the call as an autograd function; under torch.compile and dispatch modes as one operator."""
    _refuse_tracers(call.sites[0])
    # No operator takes these.
    in_codes = isinstance(x, QuantizedActivation) or any(
        isinstance(weight, Fp8Parameter) for weight in weights
    )
    if torch.compiler.is_compiling():
        from .compiled import break_graph, traced_linear  # loads torch's compiler

        if in_codes:
            return break_graph(_run_eager, x, weights, bias, tokens, call)
        return traced_linear(x, weights, bias, tokens, call)
    # Every site is asked: each remembers what it answered.
    watched = [site.forwards.as_operator(x, weight) for site, weight in zip(call.sites, weights, strict=True)]
    if not any(watched):
        return _run_eager(x, weights, bias, tokens, call)
    if in_codes:
        with _disable_current_modes():
            return _run_eager(x, weights, bias, tokens, call)
    from .compiled import traced_linear  # loads torch's compiler

    return traced_linear(x, weights, bias, tokens, call)


def _refuse_tracers(site: GemmSite) -> None:
    """RuntimeError where a program is made of the call, to run without the model, or where torch.func transforms it."""
    # Not is_exporting(): up to torch 2.12 Dynamo takes it to be true in everything that it traces.
    if torch.compiler._is_exporting_flag:
        raise RuntimeError(
            f"{site.plan.name}: torch.export (torch.onnx and pipelining's pipeline() use it) makes a program that"
            " outlives the model, and FP8 state cannot go along: export inside fp8_autocast(enabled=False), or after"
            " convert_from_fp8(model); for pipelines make each PipelineStage of a converted module"
        )
    if torch.compiler.is_compiling():
        return
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"{site.plan.name}: torch.jit.trace does not see through an FP8 linear: use torch.compile, or trace inside"
            " fp8_autocast(enabled=False)"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{site.plan.name}: the transforms of torch.func (grad, vmap, jvp) do not see through an FP8 linear: use"
            " loss.backward() and batched inputs, or call it inside fp8_autocast(enabled=False)"
        )


def _run_eager(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    tokens: Tokens | None,
    call: Call,
) -> torch.Tensor:
    site = call.sites[0]
    if tokens is not None:
        numbers = on_host(tokens)
        check_numbers(site.plan.name, numbers, len(x))
        call = call._replace(tokens=numbers)
    when = recorded(call.training, x, bias, *weights)
    if when == NOW and site.state.observer is None:
        site.state.activity.awaits = True
        return _apply(x, weights, bias, call._replace(record=True), None)
    options: Any = {"training": call.training, "when": when}
    with counted_forward(call.sites, call.split(x), weights, **options) as (record, late):
        return _apply(x, weights, bias, call._replace(record=record), late)


def on_host(tokens: Tokens) -> list[int]:
    """The numbers, which the host waits for if they are on a GPU."""
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)


def check_numbers(name: str, tokens: Sequence[int], rows: int) -> None:
    """ValueError, in the name of a site, unless these numbers of tokens share out so many rows."""
    if not all(isinstance(count, int) for count in tokens):
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} must be whole numbers: use an integer tensor, or its tolist()"
        )
    if min(tokens) < 0 or sum(tokens) != rows:
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} sum to {sum(tokens)}, and the input has {rows} rows: they say"
            " how many rows each expert has, in order"
        )


def some_together(
    x: torch.Tensor,
    tokens: Tokens,
    joins: Sequence[bool],
    together: Callable[[list[int], torch.Tensor, Tokens], torch.Tensor],
    alone: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[T, N] of tokens [T, K], where only some experts can be multiplied in one call.

    Args:
        tokens: T_e, in order. They are read here only if an expert cannot.
        joins: whether an expert can be.
        together: gives the rows of these experts, of their tokens one after the other, and of their numbers.
        alone: gives one expert's.
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


class _Options(NamedTuple):
    """Options of a forward: the call, whether gradients are enabled, and the record that its backward makes late."""

    call: Call
    grad_enabled: bool
    late: DeferredRecord | None


def _apply(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    call: Call,
    late: DeferredRecord | None,
) -> torch.Tensor:
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # for its jvp
        return _LinearFunction.apply(x, bias, _Options(call, torch.is_grad_enabled(), late), *weights)
    y = forward(x, weights, bias, call, [False] * len(weights)).y
    _forget(call)
    return y


def _forget(call: Call) -> None:
    """Where weights are not kept the next call quantizes them again; what backward needs was saved."""
    for site in call.sites:
        if not site.state.keeps_weights:
            site.weights.forget()


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, options: _Options, *weights: torch.Tensor
    ) -> torch.Tensor:
        call = options.call
        needs_dgrad, _, _, *needs_wgrad = [need and options.grad_enabled for need in ctx.needs_input_grad]
        ctx.options, ctx.weights = options, [for_gradient(weight) for weight in weights]
        ctx.x_shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        done = forward(x, weights, bias, call, needs_wgrad)
        saved = [SavedOperand.of(operand) for operand in done.x]
        for site, weight, sides in zip(call.sites, weights, done.weights, strict=True):
            if needs_dgrad and sides.columnwise is None:
                stamp = stamp_of(site.weights, x.device, training=call.training)
                saved.append(SavedOperand((weight, *stamp), AGAIN))
            else:
                saved.append(SavedOperand.of(sides.columnwise if needs_dgrad else None))
        _forget(call)
        ctx.specs = [operand.spec for operand in saved]
        save(ctx, [tensor for operand in saved for tensor in operand.tensors])
        return done.y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, _, late = ctx.options
        came_back(call.sites[0].state)
        if late is not None:
            late.record(call.sites)
        needs_dgrad, needs_dbias, _, *needs_wgrad = ctx.needs_input_grad
        tensors = given_back(ctx, call.sites[0].plan.name)
        with without_autocast(grad_output.device):  # backward() may be called inside it
            saved_x, saved_w = _restored(ctx.specs, tensors, call)
            dbias_dtype = ctx.bias_dtype if needs_dbias else None
            done = backward(
                grad_output, saved_x, saved_w, ctx.weights, call, needs_dgrad, needs_wgrad, dbias_dtype
            )
        dx = done.dx if done.dx is None or done.dx.shape == ctx.x_shape else done.dx.view(ctx.x_shape)
        return dx, done.dbias, None, *done.dw

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """RuntimeError: there is none."""
        raise RuntimeError(
            "an FP8 linear has no forward-mode derivative: use backward(), or call it inside fp8_autocast(enabled=False)"
        )


def _restored(
    specs: Sequence[Any], tensors: list[torch.Tensor], call: Call
) -> tuple[list[Operand | None], list[Operand | None]]:
    """The operands that forward saved, of tokens and of weights, each site's."""
    found: list[Operand | None] = []
    count = len(call.sites)
    for i, spec in enumerate(specs):
        if spec == AGAIN:
            weight, stamp, scale = tensors.pop(0), tensors.pop(0), tensors.pop(0)
            found.append(columnwise_of(call.sites[i - count].weights, weight, stamp, scale))
        else:
            found.append(SavedOperand.restore(spec, tensors))
    return found[:count], found[count:]

"""The linear layer: three GEMMs, what is saved between them, and who may trace them.

linear_ops.py computes; this file is its autograd function. Saved for backward: the input's columnwise codes (one byte
a value, and scales) and the weight's, not BF16. The function is told its GEMMs (a GemmSite) and its communication (a
TensorParallel); it chooses neither. Rejected: the forty loose arguments and the flags for every kernel that such
functions grow elsewhere.

While torch.compile traces, or a dispatch mode is on, the same passes are called as two opaque operators (compiled.py).
Elsewhere they are called directly: for a small linear, torch's dispatcher would take longer than autograd's function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ..params.fp8_parameter import Fp8Parameter
from ..plan.autocast_state import is_watched, without_autocast
from ..state.iteration import NOW, recorded
from .amax_recorder import DeferredRecord, came_back, counted_forward
from .dgrad_weight import columnwise_of, stamp_of
from .double_backward_guard import guard
from .gemm_site import GemmSite
from .linear_ops import Call, backward, for_gradient, forward
from .quantized_activation import QuantizedActivation
from .saved_operands import AGAIN, Facts, SavedOperand, Spec, check_given_back, facts_of
from .tensor_parallel import ALONE, TensorParallel


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
        QuantizedActivation
            are multiplied as they are.
        weight: [N, K], this rank's part. If it has ``main_grad``, wgrad (float32) is added to it and the autograd
            gradient is an uninitialised dummy, as Megatron-Core's DistributedDataParallel expects of a fused wgrad.
        bias: [N], added in float32 before the one rounding; its gradient is the float32 sum of dy, unquantised. None
            with row parallelism, where it belongs after the sum over ranks.
        site, tp: the GEMMs and the communication.
        training: the layer's mode. What is recorded and counted, and when, says state/iteration.py.
        fresh_weight: quantise the weight again even if this iteration has done so.
        save_original_input: keep x itself for wgrad, and quantise it again there. For callers that recompute x anyway.

    Returns:
        [..., N] in x's dtype. NaN in x or weight gives NaN where it is multiplied; Inf saturates and is counted (under
        MX's largest scale the saturated value itself is beyond bfloat16).

    Raises:
        ValueError: x's last dimension is not the weight's, or they are on different devices.
        RuntimeError: it is being exported or jit-traced, or transformed by torch.func.
    """
    check_devices(site, x, weight, bias)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{site.plan.name}: input {tuple(x.shape)} does not fit weight {tuple(weight.shape)};"
            f" its last dimension must be {weight.shape[1]}"
        )
    assert bias is None or tp.kind != "row", (
        "each rank would add a row-parallel bias, and their sum would count it again"
    )
    compiling = torch.compiler.is_compiling()
    refuse_tracers(site)
    eager = (x, weight, bias, site, tp, training, save_original_input, fresh_weight)
    if compiling:
        from .compiled import break_graph, traced_linear  # loads torch's compiler

        if isinstance(weight, Fp8Parameter):
            return break_graph(_eager_linear, *eager)
        return traced_linear(*eager[:5], training=training, save_original_input=save_original_input)
    if isinstance(weight, Fp8Parameter) or isinstance(x, QuantizedActivation):  # no operator takes these
        if site.state.capturing or not is_watched(x, weight):
            return _eager_linear(*eager)
        with _disable_current_modes():
            return _eager_linear(*eager)
    if site.forwards.as_operator(x, weight):
        from .compiled import traced_linear  # loads torch's compiler

        return traced_linear(*eager[:5], training=training, save_original_input=save_original_input)
    return _eager_linear(*eager)


def check_devices(site: GemmSite, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """ValueError unless input, weight and bias are on one device, as torch's linear asks."""
    device = x.device
    if weight.device == device and (bias is None or bias.device == device):
        return
    beside = "" if bias is None else f" and its bias on {bias.device}"
    raise ValueError(
        f"{site.plan.name}: the input is on {device}, the weight on {weight.device}{beside}: move the model or the input;"
        " weights on meta have no memory before to_empty"
    )


def refuse_tracers(site: GemmSite) -> None:
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


def _eager_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: GemmSite,
    tp: TensorParallel,
    training: bool,
    save_original_input: bool,
    fresh_weight: bool,
) -> torch.Tensor:
    when = recorded(training, x, weight, bias)
    call = Call(site, tp, training, when == NOW, fresh_weight, save_original_input)
    if call.record and site.state.observer is None:
        site.state.activity.awaits = True
        return _linear(x, weight, bias, call, None)
    with counted_forward([site], [x], [weight], training=training, when=when) as (record, late):
        return _linear(x, weight, bias, call._replace(record=record), late)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call, late: DeferredRecord | None
) -> torch.Tensor:
    if torch.is_grad_enabled():
        return _LinearFunction.apply(x, weight, bias, _Options(call, True, late))
    if forward_ad._current_level >= 0:
        return _LinearFunction.apply(x, weight, bias, _Options(call, False, None))  # for its jvp
    y = forward(x, weight, bias, call, False).y
    if not call.site.state.keeps_weights:
        call.site.weights.forget()
    return y


def refuse_tangents(ctx: Any, *tangents: Any) -> Any:
    """The forward-mode derivative of an FP8 linear: RuntimeError."""
    raise RuntimeError(
        "an FP8 linear has no forward-mode derivative: use backward(), or call it inside fp8_autocast(enabled=False)"
    )


class _Metadata(NamedTuple):
    """Facts about a forward that its backward needs, besides tensors and the call."""

    x_shape: torch.Size
    bias_dtype: torch.dtype | None
    specs: tuple[Spec, Spec]
    saved: tuple[Facts, ...]


class _Options(NamedTuple):
    """Options of a forward: the call, whether gradients are enabled, and the record that its backward makes late."""

    call: Call
    grad_enabled: bool
    late: DeferredRecord | None


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: _Options,
    ) -> torch.Tensor:
        call, grad_enabled, late = options
        ctx.weight, ctx.call, ctx.late = for_gradient(weight), call, late
        needs_dgrad, needs_wgrad, *_ = (need and grad_enabled for need in ctx.needs_input_grad)
        done = forward(x, weight, bias, call, needs_wgrad)
        again = needs_dgrad and done.weight.columnwise is None
        kept_x = SavedOperand.of(done.x if needs_wgrad else None)
        kept_w = SavedOperand.of(done.weight.columnwise if needs_dgrad else None)
        if again:
            stamp = stamp_of(call.site.weights, x.device, training=call.training)
            kept_w = SavedOperand((weight, *stamp), AGAIN)
        if not call.site.state.keeps_weights:
            call.site.weights.forget()  # the next call quantises again; what backward needs is saved below
        tensors = *kept_x.tensors, *kept_w.tensors
        specs, bias_dtype = (kept_x.spec, kept_w.spec), None if bias is None else bias.dtype
        ctx.forward_metadata = _Metadata(x.shape, bias_dtype, specs, facts_of(tensors))
        ctx.save_for_backward(*tensors)
        return done.y

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() or is_batchedtensor(grad_output) or is_legacy_batchedtensor(grad_output):
            refused: tuple[torch.Tensor | None, ...] = guard(_gradients, ctx, grad_output)
            return refused
        return _gradients(ctx, grad_output)

    jvp = staticmethod(refuse_tangents)


def _gradients(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x_shape, bias_dtype, specs, facts = ctx.forward_metadata
    call, weight = ctx.call, ctx.weight
    came_back(call.site.state)
    if ctx.late is not None:
        ctx.late.record([call.site])
    needs, tensors = ctx.needs_input_grad, ctx.saved_tensors
    check_given_back(call.site.plan.name, tensors, facts)
    queue = list(tensors)
    with without_autocast(grad_output.device):  # backward() may be called inside it
        saved_x, saved_w = (None if spec == AGAIN else SavedOperand.restore(spec, queue) for spec in specs)
        if specs[1] == AGAIN:
            saved_w = columnwise_of(call.site.weights, *queue)
        wanted_bias = bias_dtype if needs[2] else None
        done = backward(grad_output, saved_x, saved_w, weight, call, needs[:2], wanted_bias)
    dx = done.dx
    if dx is not None and dx.shape != x_shape:
        dx = dx.view(x_shape)
    return dx, done.dw, done.dbias, None

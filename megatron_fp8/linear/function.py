"""The linear layer: three GEMMs, what is saved between them, and who may trace them.

passes.py computes; this file is its autograd function. Saved for backward: the input's columnwise codes (one byte
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ..numerics.rule import Granularity
from ..params.fp8_parameter import Fp8Parameter
from ..plan.switch import in_recompute, without_autocast
from ..state.observer import SeenLinear
from ..tensor import Operand, QuantizedSide
from .derivative import guard
from .passes import Call, backward, evaluate, forward
from .site import GemmSite
from .tensor_parallel import TensorParallel

_ALONE = TensorParallel()


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: GemmSite,
    tp: TensorParallel = _ALONE,
    *,
    training: bool = True,
    fresh_weight: bool = False,
    save_original_input: bool = False,
) -> torch.Tensor:
    """y = x @ weight^T + bias with the GEMMs of ``site``.

    Args:
        x: [..., K]; leading dimensions are tokens. With column and sequence parallelism: this rank's tokens.
        weight: [N, K], this rank's part. If it has ``main_grad``, wgrad (float32) is added to it and the autograd
            gradient is an uninitialised dummy, as Megatron-Core's DistributedDataParallel expects of a fused wgrad.
        bias: [N], added in float32 before the one rounding; its gradient is the float32 sum of dy, unquantised. None
            with row parallelism, where it belongs after the sum over ranks.
        site, tp: the GEMMs and the communication.
        training: amaxes and health are recorded (a recomputed forward records nothing); False: nothing is recorded nor
            counted, in the backward neither.
        fresh_weight: quantise the weight again even if this iteration has done so.
        save_original_input: keep x itself for wgrad, and quantise it again there. For callers that recompute x anyway.

    Returns:
        [..., N] in x's dtype. NaN in x or weight gives NaN where it is multiplied; Inf saturates and is counted (under
        MX's largest scale the saturated value itself is beyond bfloat16).

    Raises:
        ValueError: x's last dimension is not the weight's.
        RuntimeError: it is being exported or jit-traced, or transformed by torch.func.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{site.plan.name}: input {tuple(x.shape)} does not fit weight {tuple(weight.shape)};"
            f" its last dimension must be {weight.shape[1]}"
        )
    assert bias is None or tp.kind != "row", (
        "each rank would add a row-parallel bias, and their sum would count it again"
    )
    refuse_tracers(site)
    eager = (x, weight, bias, site, tp, training, save_original_input, fresh_weight)
    if torch.compiler.is_compiling():
        from .compiled import break_graph, traced_linear  # loads torch's compiler

        if isinstance(weight, Fp8Parameter):
            return break_graph(_eager_linear, *eager)
        return traced_linear(*eager[:5], training=training, save_original_input=save_original_input)
    as_operator = site.forwards.as_operator(x, weight)
    if as_operator and isinstance(weight, Fp8Parameter):
        with _disable_current_modes():
            return _eager_linear(*eager)
    if as_operator:
        from .compiled import traced_linear  # loads torch's compiler

        return traced_linear(*eager[:5], training=training, save_original_input=save_original_input)
    return _eager_linear(*eager)


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
    call = Call(site, tp, training, training and not in_recompute(), fresh_weight, save_original_input)
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _LinearFunction.apply(x, weight, bias, call, torch.is_grad_enabled())
    y = evaluate(x, weight, bias, call)  # autograd's function takes as long as all of this for one token
    if not site.state.keeps_weights:
        site.weights.forget()
    return y


def observe_high_precision(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, site: GemmSite
) -> torch.Tensor:
    """Record the amaxes of a linear that ran in high precision in training, for delayed scaling (GemmSite.observe).

    Returns y [..., N], unchanged. Go on with what is returned: in traced code the recording hangs on it.
    """
    if torch.compiler.is_compiling() or site.forwards.as_operator(x, weight):
        from .compiled import traced_observation

        return traced_observation(x, weight, y, site)
    site.observe(x, weight, y, record=not in_recompute())
    return y


def watch_high_precision(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, site: GemmSite, *, shard: bool = False
) -> None:
    """Tell the observer, if there is one, of a linear that ran in high precision in training.

    It does not hear of what is traced or transformed, or has no memory.
    """
    if torch.compiler.is_compiling() or (observer := site.state.observer) is None:
        return
    if x.is_meta or isinstance(x, FakeTensor) or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    with _disable_current_modes():  # what keeps or counts operations has no business with an observer's
        observer.high_precision(SeenLinear(site.plan.name, x, weight, y, not in_recompute(), shard))


def refuse_tangents(ctx: Any, *tangents: Any) -> Any:
    """The forward-mode derivative of an FP8 linear: RuntimeError."""
    raise RuntimeError(
        "an FP8 linear has no forward-mode derivative: use backward(), or call it inside fp8_autocast(enabled=False)"
    )


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: Call,
        grad_enabled: bool,
    ) -> torch.Tensor:
        needs_dgrad, needs_wgrad = (need and grad_enabled for need in ctx.needs_input_grad[:2])
        done = forward(x, weight, bias, call, needs_wgrad)
        kept_w = Kept.of(done.weight.columnwise if needs_dgrad else None)
        if needs_dgrad and done.weight.columnwise is None:
            kept_w = Kept((weight, *call.site.weights.stamp(x.device, training=call.training)), AGAIN)
        if not call.site.state.keeps_weights:
            call.site.weights.forget()  # the next call quantises again; what backward needs is saved below
        ctx.call, ctx.x_shape, ctx.weight = call, x.shape, weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        kept_x = Kept.of(done.x if needs_wgrad else None)
        ctx.kept = (kept_x.spec, kept_w.spec)
        ctx.save_for_backward(*kept_x.tensors, *kept_w.tensors)
        return done.y

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled() or is_batchedtensor(grad_output) or is_legacy_batchedtensor(grad_output):
            refused: tuple[torch.Tensor | None, ...] = guard(_gradients, ctx, grad_output)
            return refused
        return _gradients(ctx, grad_output)

    jvp = staticmethod(refuse_tangents)


def _gradients(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs_dgrad, needs_wgrad, needs_dbias, *_ = ctx.needs_input_grad
    tensors = list(ctx.saved_tensors)
    saved_x, saved_w = (None if spec == AGAIN else Kept.restore(spec, tensors) for spec in ctx.kept)
    with without_autocast(grad_output.device):  # backward() may be called inside it
        if ctx.kept[1] == AGAIN:
            saved_w = ctx.call.site.weights.columnwise(*tensors)
        dx, dw, dbias = backward(
            grad_output,
            saved_x,
            saved_w,
            ctx.weight,
            ctx.call,
            (needs_dgrad, needs_wgrad),
            ctx.bias_dtype if needs_dbias else None,
        )
    if dx is not None and dx.shape != ctx.x_shape:
        dx = dx.view(ctx.x_shape)
    return dx, dw, dbias, None, None


AGAIN = "again"
"""Kept of a weight: itself and its stamp, from which ``WeightCache.columnwise`` makes the operand."""


class Kept(NamedTuple):
    """An operand taken apart into tensors for save_for_backward and the facts that put it together again."""

    tensors: tuple[torch.Tensor, ...]
    spec: tuple[Granularity, bool, bool, bool] | str | None

    @staticmethod
    def of(operand: Operand | None) -> Kept:
        if operand is None:
            return Kept((), None)
        if isinstance(operand, QuantizedSide):
            return Kept(
                (operand.codes, operand.scale_inv),
                (operand.granularity, operand.pow2, operand.finite, operand.tiled),
            )
        return Kept((operand,), "plain")

    @staticmethod
    def restore(
        spec: tuple[Granularity, bool, bool, bool] | str | None, tensors: list[torch.Tensor]
    ) -> Operand | None:
        """The operand again; takes its tensors off the front of the list."""
        if spec is None:
            return None
        if isinstance(spec, str):
            return tensors.pop(0)
        codes, scale_inv = tensors.pop(0), tensors.pop(0)
        return QuantizedSide(codes, scale_inv, *spec)

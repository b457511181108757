"""The linear as two operators, for torch.compile and dispatch modes.

    linear           y, codes, scales, stamp, scale, measured, counted  =  x, weight, bias, site
    linear_backward  dx, dw, dbias  =  dy, (x | codes, scales), weight, stamp, scale, measured, counted, site

Backward reads codes and scales, the saved input. stamp and scale say how the forward quantised the weight; measured and
counted are the deferred record of an evaluation-mode forward (amax_recorder.py).

A cast records into a slot, a weight is quantised once an iteration, kernels are launched by pointer, stochastic rounding
counts its calls. A tracer would have to guard on this state or bake it in. So the operators run eagerly and keep it; the
graph sees tensors only. What backward needs is an output like any other (one byte a value): a compiler may plan its
memory, offload it and fuse around it. The native kernels already fuse amax, cast and transpose.

Arguments, and why they have this form:

* the site, as a number in an int64 tensor on the CPU. A Python number would be a constant of the graph, and each layer of
  a model compiled block by block would be compiled again;
* its ``saved_layout``, a string that determines the outputs' layouts. Dynamo guards on it, so layers of one recipe share
  a graph and layers of another recipe do not;
* the number of this call in the trace. Two calls of one layer on one input look equal, but each adds to the gradient, so
  no compiler may merge them. The first number depends on this folder's sources: Inductor caches graphs on disk by their
  code, and operators of other sources may return other layouts for the same code.

Side effects outside the graph: slots (a maximum and a sum, in any order), counters, the cached weight, main_grad. No
result in the graph reads them. The site caches the weight's codes between forward and backward; if they were replaced,
backward quantises the same weight again with the same scale.

Rejected: tracing through, as torchao does, with everything in torch operations. It suits tensors that carry their
state; here slots, caches and Triton launches would each need a functional twin, and bits would differ from eager mode's.
Rejected: an effect token through the graph (torch's effectful operators): it orders what needs no order, and current
versions of torch split backward effects wrongly (pytorch#172248). Rejected: disabling compilation around the layer, as
Transformer Engine did for years: each linear breaks the graph.

CUDA graphs: an operator with Python state must not be replayed alone, so both are tagged ``cudagraph_unsafe``: with
mode="reduce-overhead" the rest of a graph is captured, and the operators run in between. To capture everything, capture
the step (docs/performance.md).
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._guards import detect_fake_mode
from torch.utils.flop_counter import register_flop_formula

from ..state.iteration import LATER, in_backward, recorded
from ..tensor import Operand, QuantizedSide
from .amax_recorder import DeferredRecord, came_back, counted_forward
from .compile_handles import site_by_handle
from .dgrad_weight import columnwise_of, stamp_of, was_training
from .gemm_site import GemmSite
from .linear_ops import Call, backward, forward, keeps_codes
from .saved_tensor_layout import SideLayout
from .tensor_parallel import TensorParallel

# The oldest supported versions of torch lack the tag.
_KEPT_OUT_OF_GRAPHS = hasattr(torch.Tag, "cudagraph_unsafe")
TAGS = [torch.Tag.needs_exact_strides] + ([torch.Tag.cudagraph_unsafe] if _KEPT_OUT_OF_GRAPHS else [])


def first_call(sources: Path) -> int:
    """The number of a process's first call, from a checksum of the modules in this folder."""
    texts = b"".join(path.read_bytes() for path in sorted(sources.glob("*.py")))
    return zlib.crc32(texts) << 24


_calls = itertools.count(first_call(Path(__file__).parent))


@torch.compiler.assume_constant_result
def next_call() -> int:
    """The number of a call. The tracer runs this; the graph holds the result as a constant."""
    return next(_calls)


def traced_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: GemmSite,
    tp: TensorParallel,
    *,
    training: bool,
    save_original_input: bool,
) -> Tensor:
    """fp8_linear while torch.compile traces, or under a dispatch mode: y [..., N] of x [..., K], weight [N, K], bias [N].

    Training quantises the weight once an iteration if the state ``keeps_weights``, else at each call; evaluation does so
    at each call. It ignores Megatron's ``is_first_microbatch``, each value of which would need its own graph.
    """
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    call = Call(site, tp, training, True, False, save_original_input)
    keeps = needs_wgrad and keeps_codes(math.prod(x.shape[:-1]), call)
    y, *_ = torch.ops.megatron_fp8.linear(
        x,
        weight,
        bias,
        handle_for(site, x, weight),
        site.traced.saved_layout,
        _describe(tp),
        keeps,
        training,
        recorded(training, x, weight, bias),
        next_call(),
    )
    return y


def handle_for(site: GemmSite, *given: Tensor) -> Tensor:
    """The site's handle, int64 [], as an argument beside these tensors of any shape."""
    return beside(site.traced.handle, *given)


def beside(real: Tensor, *given: Tensor) -> Tensor:
    """``real``, of any shape, as an argument beside others: a fake copy where their fake mode rejects real ones."""
    if torch.compiler.is_compiling():
        return real
    mode = detect_fake_mode(given)
    return real if mode is None or mode.allow_non_fake_inputs else mode.from_tensor(real)


@torch.compiler.disable(
    reason="torch.compile cannot trace a weight that lives as FP8, a tensor of bytes (fp8_param, FP8 all-gather),"
    " experts' tokens in FP8 (moe_fp8_dispatch), experts in one call of which one is called apart (in BF16, or heard by"
    " hooks), for which the host reads their numbers of tokens, nor fp8_matmul, which has no layer to keep its state:"
    " compile without fullgraph, or use weights in BF16, moe_fp8_dispatch=False, experts alike, and Fp8Linear"
)
def break_graph(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the function outside any graph."""
    return function(*args, **kwargs)


@torch.library.custom_op("megatron_fp8::linear", mutates_args=(), tags=TAGS)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    site: Tensor,
    layout: str,
    tp: str,
    keeps: bool,
    training: bool,
    when: str,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns y [..., N]; x's columnwise codes [K, tokens] and scales (empty unless ``keeps``); the tensors of
    ``stamp_of``; the tensors of ``DeferredRecord.saved`` (empty unless ``when`` is LATER).

    Args:
        x, weight, bias: [..., K], [N, K], [N] or None.
        site: int64 [] on the CPU, a GemmSite's handle.
        layout: the site's saved_layout (compile_handles.CompileHandle).
        tp: the communication, from ``_describe``.
        keeps: return x's codes for wgrad.
        training: the layer's mode.
        when: when to record the forward: NOW, LATER or NEVER.
        number: distinguishes calls; not read.
    """
    found = site_of(site)
    if in_backward():
        check_recomputed(found)
    else:
        found.traced.multiplied_by(weight)
    with counted_forward([found], [x], [weight], training=training, when=when) as (record, late):
        call = Call(found, _parallel(tp), training, record, not training, not keeps, traced=keeps)
        done = forward(x, weight, bias, call, keeps)
    stamp = stamp_of(found.weights, x.device, training=training)
    others = *stamp, *saved_record(late, x)
    if not keeps:
        return done.y, x.new_empty(0), x.new_empty(0), *others
    assert isinstance(done.x, QuantizedSide)
    return done.y, *SideLayout.parse(layout).take_apart(done.x), *others


@linear.register_fake
def _(x, weight, bias, site, layout, tp, keeps, training, when, number):
    parallel = _parallel(tp)
    shape = [*x.shape[:-1], weight.shape[0]]
    if parallel.sequence_parallel:
        shape[0] = shape[0] * parallel.size if parallel.kind == "column" else shape[0] // parallel.size
    y = x.new_empty(shape)
    stamp = torch.empty(2, dtype=torch.int64, device="cpu"), x.new_empty((), dtype=torch.float32)
    others = *stamp, *empty_record(x, 1 if when == LATER else 0)
    if not keeps:
        return y, x.new_empty(0), x.new_empty(0), *others
    lies, size = SideLayout.parse(layout), (x.shape[-1], math.prod(x.shape[:-1]))
    return y, lies.codes(*size).empty(x.device), lies.scales(*size).empty(x.device), *others


def saved_record(late: DeferredRecord | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``late.saved()``, or empty tensors on the device of x (any shape) without a deferred record."""
    return empty_record(x, 0) if late is None else late.saved()


def empty_record(x: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    """Uninitialised tensors in the shapes of ``DeferredRecord.saved`` for this many sites, on x's device (any shape)."""
    measured = x.new_empty((sites, 2, 2), dtype=torch.float32)
    return measured, torch.empty(7 if sites else 0, dtype=torch.int64, device="cpu")


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, site, layout, tp, keeps, *_, number = inputs
    _, *others = output
    codes, scales, *about_forward = others
    needs_wgrad = ctx.needs_input_grad[1]
    kept = [codes, scales] if keeps else [x] if needs_wgrad else []
    ctx.save_for_backward(weight, site, *about_forward, *kept)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*others)
    ctx.arguments = (layout, tp, number)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, site, stamp, weight_scale, measured, counted, *kept = ctx.saved_tensors
    needs_dgrad, needs_wgrad, needs_dbias, *_ = ctx.needs_input_grad
    dx, dw, dbias = torch.ops.megatron_fp8.linear_backward(
        dy,
        kept,
        weight,
        stamp,
        weight_scale,
        measured,
        counted,
        site,
        *ctx.arguments,
        needs_dgrad,
        needs_wgrad,
        ctx.bias_dtype if needs_dbias else None,
    )
    grads = (dx if needs_dgrad else None, dw if needs_wgrad else None, dbias if needs_dbias else None)
    return *grads, *[None] * 7


torch.library.register_autograd("megatron_fp8::linear", _differentiate, setup_context=_save)


@torch.library.custom_op("megatron_fp8::linear_backward", mutates_args=(), tags=TAGS)
def linear_backward(
    dy: Tensor,
    kept: list[Tensor],
    weight: Tensor,
    stamp: Tensor,
    weight_scale: Tensor,
    measured: Tensor,
    counted: Tensor,
    site: Tensor,
    layout: str,
    tp: str,
    number: int,
    needs_dgrad: bool,
    needs_wgrad: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx [..., K], dw [N, K] and dbias [N]; gradients that are not needed are empty.

    Args:
        dy: [..., N].
        kept: the saved input: codes [K, tokens] and scales, or x [..., K]; empty without dw.
        weight: [N, K].
        stamp, weight_scale: int64 [2] and float32 [] of ``stamp_of``: how forward quantised the weight.
        measured, counted: float32 [1, 2, 2] and int64 [7], forward's deferred record, or empty.
        bias_dtype: None if dbias is not needed.
        site, layout, tp, number: as in ``linear``.
    """
    found = site_of(site)
    call = Call(found, _parallel(tp), was_training(stamp), False, False, len(kept) == 1)
    saved_x: Operand | None = None
    if len(kept) == 1:
        saved_x = kept[0].reshape(-1, kept[0].shape[-1]).t()
    elif kept:
        saved_x = SideLayout.parse(layout).put_together(*kept)
    saved_w = columnwise_of(found.weights, weight, stamp, weight_scale) if needs_dgrad else None
    parameter, needs = found.traced.parameter(weight), (needs_dgrad, needs_wgrad)
    came_back(found.state)
    if len(counted):
        DeferredRecord.restored(measured, counted).record([found])
    done = backward(dy, saved_x, saved_w, parameter, call, needs, bias_dtype)
    empty = dy.new_empty(0)
    dx = empty if done.dx is None else done.dx.view(*_dx_shape(dy, call.tp), weight.shape[1])
    dw = dy.new_empty(0) if done.dw is None else done.dw
    return dx, dw, dy.new_empty(0) if done.dbias is None else done.dbias


@linear_backward.register_fake
def _(dy, kept, weight, stamp, scale, measured, counted, site, layout, tp, number, *wanted):
    needs_dgrad, needs_wgrad, bias_dtype = wanted
    shape = [*_dx_shape(dy, _parallel(tp)), weight.shape[1]]
    dx = dy.new_empty(shape if needs_dgrad else 0)
    dw = weight.new_empty(weight.shape) if needs_wgrad else dy.new_empty(0)
    dbias = dy.new_empty(0) if bias_dtype is None else dy.new_empty(dy.shape[-1], dtype=bias_dtype)
    return dx, dw, dbias


# ------------------------------------------------------------------------------------------------------------ FLOPs


@register_flop_formula(torch.ops.megatron_fp8.linear)
def _(x_shape, weight_shape, *_, **__):
    """For torch.utils.flop_counter: the FLOPs of one GEMM."""
    return 2 * math.prod(x_shape) * weight_shape[0]


@register_flop_formula(torch.ops.megatron_fp8.linear_backward)
def _(
    dy_shape,
    kept,
    weight_shape,
    stamp,
    scale,
    measured,
    counted,
    site,
    layout,
    tp,
    number,
    needs_dgrad,
    needs_wgrad,
    *_,
    **__,
):
    """The FLOPs of one GEMM for dx and one for dw, where needed."""
    return 2 * math.prod(dy_shape) * weight_shape[1] * (needs_dgrad + needs_wgrad)


# ------------------------------------------------------------------------------------------------ before the trace


@torch.compiler.assume_constant_result
def prepare_layer(layer: Any) -> bool:
    """Calls layer.make_sites() during tracing, untraced; restarts the trace if that made any site.

    The trace so far has read that there are no sites. At a graph break Dynamo traces the function again and fails if it
    reads something else. A graph that starts with sites is shared by all layers of one structure.
    """
    if layer.make_sites():
        raise UnspecializeRestartAnalysis(restart_reason="FP8 layers were prepared")
    return True


def site_of(handle: Tensor) -> GemmSite:
    """The site of a handle, int64 []. RuntimeError if this torch captures the operator: a replay skips its Python."""
    site = site_by_handle(handle)
    captured = (
        not _KEPT_OUT_OF_GRAPHS and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
    if captured and not site.state.capturing:
        raise RuntimeError(
            'this version of torch puts FP8 operators into the CUDA graphs of mode="reduce-overhead", though they keep'
            " state on the host: compile without that mode, or capture the step (megatron_fp8.state.graph.CapturedStep)"
        )
    return site


def check_recomputed(site: GemmSite) -> None:
    """RuntimeError if a recomputation reaches a site whose forward never ran."""
    if not site.has_run:
        raise RuntimeError(
            f"{site.plan.name}: FP8 was switched off, or to another recipe, around a compiled forward, and its"
            " recomputation, which finds what is said in the backward, would not run so: checkpoint"
            " megatron_fp8.plan.autocast_state.remember_fp8(function) in place of the compiled function"
        )


def _dx_shape(dy: Tensor, tp: TensorParallel) -> list[int]:
    """Leading dimensions of dx for dy [..., N]; sequence parallelism scales the first by the group size."""
    shape = list(dy.shape[:-1])
    if tp.sequence_parallel:
        shape[0] = shape[0] // tp.size if tp.kind == "column" else shape[0] * tp.size
    return shape


# --------------------------------------------------------------------------------------------------- communication


def _describe(tp: TensorParallel) -> str:
    """A TensorParallel as a string, a constant of the graph; '' without communication."""
    if tp.kind == "none":
        return ""
    flags = f"{int(tp.sequence_parallel)} {int(tp.reduce_dgrad)}"
    return f"{tp.kind} {flags} {tp.rank} {tp.size} {tp.group.group_name}"


def _parallel(described: str) -> TensorParallel:
    """Parses ``_describe``'s string. It looks the group up each time: torch reuses group names."""
    if not described:
        return TensorParallel()
    kind: Any
    kind, sequence_parallel, reduce_dgrad, rank, size, name = described.split(" ", 5)
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return TensorParallel(kind, group, sequence_parallel == "1", reduce_dgrad == "1", int(rank), int(size))

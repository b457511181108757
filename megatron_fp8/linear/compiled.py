"""The linear layer in compiled code, and under dispatch modes: two operators that are called and not looked into.

    linear           y, codes, scales, stamp, scale  =  x, weight, bias, site
    linear_backward  dx, dw, dbias  =  dy, (x | codes, scales), weight, stamp, scale, site

codes and scales are what backward keeps of x, stamp and scale tell it how the weight was quantised.

A cast records into a slot, a weight is quantised once an iteration, kernels are launched by pointer, stochastic rounding
counts its calls: state that a tracer would have to guard on, or would bake in. So all of it stays inside, eager, and the
graph sees tensors only: what is saved for backward is an output like any other (one byte a value), and compilers may
plan its memory, offload it and fuse around it. The native kernels fuse amax, cast and transpose themselves; little is
left that a compiler could add inside.

What crosses as an argument, and why so:

* the site, as a number in an int64 tensor on the CPU. A Python number would be a constant of the graph, and each layer of
  a model compiled block by block would be compiled anew;
* its ``saved_layout``, a string with all that the outputs' layouts depend on: guarded, so that layers of one recipe
  share a graph and layers of another do not;
* the number of this call in the trace. Two calls of one layer on one input may look equal, and are not: each adds to
  the gradient. No compiler may merge them.

Effects that the graph does not see: slots (a maximum and a sum, in any order), counters, the kept weight, main_grad. No
result in the graph reads them. An operator that is recomputed by activation checkpointing runs inside a backward and
records nothing, as in eager mode. The weight's codes stay with the site between forward and backward, and are made again
from the same weight, with the same scale, if others took their place.

Rejected: tracing through, as torchao does, with everything in torch operations. It suits tensors that carry their
state; here slots, caches and Triton launches would each need a functional twin, and bits would differ from eager mode's.
Rejected: an effect token through the graph (torch's effectful operators): it orders what needs no order, and versions of
torch in use split backward effects wrongly (pytorch#172248). Rejected: disabling compilation around the layer, a graph
break in each linear (Transformer Engine's way for years).

CUDA graphs: an operator with Python state must not be replayed alone, so both are tagged ``cudagraph_unsafe``: with
mode="reduce-overhead" the rest of a graph is captured, and they run between. To capture all, capture the step
(docs/performance.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._guards import detect_fake_mode
from torch.utils.flop_counter import register_flop_formula

from ..plan.switch import in_recompute
from ..tensor import Operand, QuantizedSide
from . import observed
from .passes import Call, backward, forward, keeps_codes
from .registry import site_by_handle
from .saved_layout import SideLayout
from .site import GemmSite
from .tensor_parallel import TensorParallel
from .weight_again import columnwise_of, stamp_of, was_training

# The first versions of torch that this runs on lack the tag.
_KEPT_OUT_OF_GRAPHS = hasattr(torch.Tag, "cudagraph_unsafe")
TAGS = [torch.Tag.needs_exact_strides] + ([torch.Tag.cudagraph_unsafe] if _KEPT_OUT_OF_GRAPHS else [])
_calls = itertools.count()


@torch.compiler.assume_constant_result
def next_call() -> int:
    """The number of a call; the tracer runs this, and the graph has its result as a constant."""
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
    """fp8_linear while torch.compile traces, or under a dispatch mode.

    In training the weight is quantised once an iteration if the state ``keeps_weights``, else at each call; in evaluation
    at each call. Megatron's ``is_first_microbatch`` is not asked: there would be a graph for each of its values.
    """
    needs_wgrad = torch.is_grad_enabled() and weight.requires_grad
    call = Call(site, tp, training, training, False, save_original_input)
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
        next_call(),
    )
    return y


def handle_for(site: GemmSite, *given: Tensor) -> Tensor:
    """The site's handle, for a call with what is given."""
    return beside(site.traced.handle, *given)


def beside(real: Tensor, *given: Tensor) -> Tensor:
    """A tensor to be given with others. A fake mode that refuses real ones gets a fake one: nothing is computed there."""
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
    """The function, outside any graph."""
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
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [..., N] of x [..., K] and weight [N, K]; codes [K, tokens] and scales of x's columnwise side if ``keeps``, else
    empty; and what ``stamp_of`` gives.

    Args:
        site: int64 [] on the CPU, a GemmSite's handle.
        layout: its saved_layout (registry.Traced).
        tp: the communication, from ``_describe``.
        training: amaxes and health are recorded, unless this is a recomputation; counters count.
        number: tells this call from others; not used.
    """
    found = site_of(site)
    if in_recompute():
        check_recomputed(found)
    call = Call(
        found, _parallel(tp), training, training and not in_recompute(), not training, not keeps, traced=keeps
    )
    if not in_recompute():
        found.traced.multiplied_by(weight)
    with nullcontext() if training else found.state.uncounted():
        done = forward(x, weight, bias, call, keeps)
    stamp = stamp_of(found.weights, x.device, training=training)
    if not keeps:
        return done.y, x.new_empty(0), x.new_empty(0), *stamp
    assert isinstance(done.x, QuantizedSide)
    return done.y, *SideLayout.parse(layout).take_apart(done.x), *stamp


@linear.register_fake
def _(x, weight, bias, site, layout, tp, keeps, training, number):
    parallel = _parallel(tp)
    shape = [*x.shape[:-1], weight.shape[0]]
    if parallel.sequence_parallel:
        shape[0] = shape[0] * parallel.size if parallel.kind == "column" else shape[0] // parallel.size
    y = x.new_empty(shape)
    stamp = torch.empty(2, dtype=torch.int64, device="cpu"), x.new_empty((), dtype=torch.float32)
    if not keeps:
        return y, x.new_empty(0), x.new_empty(0), *stamp
    lies, size = SideLayout.parse(layout), (x.shape[-1], math.prod(x.shape[:-1]))
    return y, lies.codes(*size).empty(x.device), lies.scales(*size).empty(x.device), *stamp


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, site, layout, tp, keeps, _, number = inputs
    _, *others = output
    codes, scales, stamp, weight_scale = others
    needs_wgrad = ctx.needs_input_grad[1]
    kept = [codes, scales] if keeps else [x] if needs_wgrad else []
    ctx.save_for_backward(weight, site, stamp, weight_scale, *kept)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*others)
    ctx.arguments = (layout, tp, number)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    weight, site, stamp, weight_scale, *kept = ctx.saved_tensors
    needs_dgrad, needs_wgrad, needs_dbias, *_ = ctx.needs_input_grad
    dx, dw, dbias = torch.ops.megatron_fp8.linear_backward(
        dy,
        kept,
        weight,
        stamp,
        weight_scale,
        site,
        *ctx.arguments,
        needs_dgrad,
        needs_wgrad,
        ctx.bias_dtype if needs_dbias else None,
    )
    grads = (dx if needs_dgrad else None, dw if needs_wgrad else None, dbias if needs_dbias else None)
    return *grads, *[None] * 6


torch.library.register_autograd("megatron_fp8::linear", _differentiate, setup_context=_save)


@torch.library.custom_op("megatron_fp8::linear_backward", mutates_args=(), tags=TAGS)
def linear_backward(
    dy: Tensor,
    kept: list[Tensor],
    weight: Tensor,
    stamp: Tensor,
    weight_scale: Tensor,
    site: Tensor,
    layout: str,
    tp: str,
    number: int,
    needs_dgrad: bool,
    needs_wgrad: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [..., K], dw [N, K] and dbias [N]; what was not asked for is empty.

    Args:
        dy: [..., N].
        kept: codes and scales, or the input itself, or nothing where there is no dw.
        stamp, weight_scale: how forward quantised the weight, and whether it was in training.
        bias_dtype: None if dbias is not wanted.
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
    done = backward(dy, saved_x, saved_w, parameter, call, needs, bias_dtype)
    empty = dy.new_empty(0)
    dx = empty if done.dx is None else done.dx.view(*_dx_shape(dy, call.tp), weight.shape[1])
    dw = dy.new_empty(0) if done.dw is None else done.dw
    return dx, dw, dy.new_empty(0) if done.dbias is None else done.dbias


@linear_backward.register_fake
def _(dy, kept, weight, stamp, weight_scale, site, layout, tp, number, needs_dgrad, needs_wgrad, bias_dtype):
    shape = [*_dx_shape(dy, _parallel(tp)), weight.shape[1]]
    dx = dy.new_empty(shape if needs_dgrad else 0)
    dw = weight.new_empty(weight.shape) if needs_wgrad else dy.new_empty(0)
    dbias = dy.new_empty(0) if bias_dtype is None else dy.new_empty(dy.shape[-1], dtype=bias_dtype)
    return dx, dw, dbias


# ------------------------------------------------------------------------------------------------------------ FLOPs


@register_flop_formula(torch.ops.megatron_fp8.linear)
def _(x_shape, weight_shape, *_, **__):
    """For torch.utils.flop_counter: one product."""
    return 2 * math.prod(x_shape) * weight_shape[0]


@register_flop_formula(torch.ops.megatron_fp8.linear_backward)
def _(
    dy_shape, kept, weight_shape, stamp, scale, site, layout, tp, number, needs_dgrad, needs_wgrad, *_, **__
):
    """One product for each gradient that is wanted."""
    return 2 * math.prod(dy_shape) * weight_shape[1] * (needs_dgrad + needs_wgrad)


# ------------------------------------------------------------------------------------------------- high precision


def traced_observation(x: Tensor, weight: Tensor, y: Tensor, site: GemmSite) -> Tensor:
    """observe_high_precision while torch.compile traces: y, or a copy of it that cannot be had without the recording."""
    if not site.has_histories:
        return y
    return torch.ops.megatron_fp8.observe(x, weight, y, handle_for(site, x, weight), next_call())


@torch.library.custom_op("megatron_fp8::observe", mutates_args=(), tags=TAGS)
def observe(x: Tensor, weight: Tensor, y: Tensor, site: Tensor, number: int) -> Tensor:
    """A copy of y; the amaxes of x and weight are recorded."""
    if not in_recompute():
        observed.observe_forward(site_by_handle(site), x, weight)
    return y.clone()


@observe.register_fake
def _(x, weight, y, site, number):
    return y.clone()


@torch.library.custom_op("megatron_fp8::observe_backward", mutates_args=(), tags=TAGS)
def observe_backward(dy: Tensor, site: Tensor, number: int) -> Tensor:
    """A copy of dy; its amax is recorded."""
    observed.observe_backward(site_by_handle(site), dy)
    return dy.clone()


@observe_backward.register_fake
def _(dy, site, number):
    return dy.clone()


def _save_site(ctx: Any, inputs: Any, output: Any) -> None:
    *_, site, ctx.number = inputs
    ctx.save_for_backward(site)


def _pass_observed(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (site,) = ctx.saved_tensors
    return None, None, torch.ops.megatron_fp8.observe_backward(dy, site, ctx.number), None, None


torch.library.register_autograd("megatron_fp8::observe", _pass_observed, setup_context=_save_site)


# ------------------------------------------------------------------------------------------------ before the trace


@torch.compiler.assume_constant_result
def prepare_layer(layer: Any) -> bool:
    """layer.make_sites(). The tracer runs it and does not look inside: sites are there before the graph reads them."""
    layer.make_sites()
    return True


def site_of(handle: Tensor) -> GemmSite:
    """The site. RuntimeError where this torch captures the operator: a replay would leave out what it does in Python."""
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
    """RuntimeError where a forward that is recomputed was none of this site."""
    if not site.has_run:
        raise RuntimeError(
            f"{site.plan.name}: FP8 was switched off, or to another recipe, around a compiled forward, and its"
            " recomputation, which finds what is said in the backward, would not run so: checkpoint"
            " megatron_fp8.plan.switch.remember_fp8(function) in place of the compiled function"
        )


def _dx_shape(dy: Tensor, tp: TensorParallel) -> list[int]:
    """Leading dimensions of dx: dy's, times or over the group's size where one side of the layer has shards of tokens."""
    shape = list(dy.shape[:-1])
    if tp.sequence_parallel:
        shape[0] = shape[0] // tp.size if tp.kind == "column" else shape[0] * tp.size
    return shape


# --------------------------------------------------------------------------------------------------- communication


def _describe(tp: TensorParallel) -> str:
    """A TensorParallel as a constant that a graph can hold: '' is none."""
    if tp.kind == "none":
        return ""
    flags = f"{int(tp.sequence_parallel)} {int(tp.reduce_dgrad)}"
    return f"{tp.kind} {flags} {tp.rank} {tp.size} {tp.group.group_name}"


def _parallel(described: str) -> TensorParallel:
    """The TensorParallel that was described. Its group is looked up each time: names are given to other groups later."""
    if not described:
        return TensorParallel()
    kind: Any
    kind, sequence_parallel, reduce_dgrad, rank, size, name = described.split(" ", 5)
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return TensorParallel(kind, group, sequence_parallel == "1", reduce_dgrad == "1", int(rank), int(size))

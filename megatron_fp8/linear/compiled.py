"""The linear as two operators, for torch.compile and dispatch modes.

    linear           y, codes, scales, stamps, scale, measured, counted  =  x, weights, bias, tokens, sites
    linear_backward  dx, dbias, dw of each weight  =  dy, (x | codes, scales), weights, stamps, ..., tokens, sites

A linear has one weight and no ``tokens``. ``grouped_linear`` and ``grouped_linear_backward`` are the same operators with
other names for a layer's experts, for checkpointing policies that name them. Experts' numbers of tokens are a tensor on
the CPU, which the operator reads when it runs; so one graph serves all numbers: it knows only their sum. Backward reads
the saved input: codes and scales. If experts' saved layouts differ, the tokens are saved in high precision, and
backward quantizes them. stamps and scale describe how the forward quantized the weights; measured and counted are the
deferred record of an evaluation-mode forward (amax_recorder.py).

A cast records into a slot, a weight is quantized once an iteration, kernels are launched by pointer, stochastic rounding
counts its calls. A tracer would need guards on this state, or make it constant. So the operators run eagerly, and the
graph has tensors only. Operands for backward are ordinary outputs (one byte a value): a compiler may plan their memory,
offload them and fuse around them. The native kernels already fuse amax, cast and transpose.

Arguments have this form because:

* each site, as a number in an int64 tensor on the CPU. A Python number would be a constant of the graph, and each layer
  of a model compiled block by block would be compiled again;
* its ``saved_layout``, a string that determines the outputs' layouts. Dynamo guards on it, so layers of one recipe share
  a graph and layers of another recipe do not;
* the number of this call in the trace: each call adds to the gradient, so no compiler may merge two that look equal.
  The first number depends on this folder's sources, since Inductor caches graphs on disk by their code alone.

Side effects outside the graph: slots (a maximum and a sum, in any order), counters, the cached weight, main_grad. No
result in the graph reads them. If the weight's cached codes were replaced since, backward makes the same ones again.

Rejected: tracing through, as torchao does; slots, caches and Triton launches would each need a functional twin, and
bits would differ from eager mode's. Rejected: an effect token through the graph; no order is needed. Rejected:
disabling compilation around the layer, as Transformer Engine did for years: each linear breaks the graph.

CUDA graphs: a replay would skip the operators' Python, so all are tagged ``cudagraph_unsafe``, and "reduce-overhead"
captures the rest. To capture everything, capture the step (docs/performance.md).
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._guards import detect_fake_mode
from torch.utils.flop_counter import register_flop_formula

from ..plan.autocast_state import without_autocast
from ..quantizer import measure
from ..state.iteration import LATER, in_backward, record_time
from ..tensor import Operand
from .amax_recorder import DeferredRecord, count_forward, observe_forward
from .amax_recorder import observe_backward as record_gradient
from .function import check_numbers
from .gemm_site import GemmSite, site_by_handle
from .linear_ops import backward, forward
from .operands import Call, keeps_codes
from .saved_operands import InputLayout, SavedInput, SideLayout
from .tensor_parallel import TensorParallel
from .weight_cache import Stamp, columnwise_of, stamps_from_tensors, stamps_to_tensors

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
    """The number of a call, a constant in the graph."""
    return next(_calls)


def traced_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    tokens: Sequence[int] | Tensor | None,
    call: Call,
) -> Tensor:
    """Calls the operator, while torch.compile traces or under a dispatch mode: y [..., N] of x [..., K], weights [N, K],
    bias [N].

    Training quantizes the weights once an iteration if the state ``keeps_weights``; otherwise, and in evaluation, each
    call quantizes them. It ignores Megatron's ``is_first_microbatch``, each value of which would need its own graph.
    """
    layouts = {site.saved_layout for site in call.sites}
    layout = layouts.pop() if len(layouts) == 1 else ""
    needs_wgrad = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    keeps = needs_wgrad and bool(layout) and keeps_codes(math.prod(x.shape[:-1]), call.sites[0], call)
    operator: Any = torch.ops.megatron_fp8.linear
    if tokens is not None:
        operator = torch.ops.megatron_fp8.grouped_linear
        if not isinstance(tokens, Tensor):
            tokens = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        tokens = match_fake_mode(tokens.to("cpu"), x, *weights)
    y: Tensor
    y, *_ = operator(
        x,
        list(weights),
        bias,
        tokens,
        [match_fake_mode(site.handle, x, *weights) for site in call.sites],
        layout,
        call.tp.to_text(),
        keeps,
        call.training,
        record_time(call.training, x, bias, *weights),
        next_call(),
    )
    return y


def match_fake_mode(real: Tensor, *given: Tensor) -> Tensor:
    """``real``, of any shape, as an argument: a fake copy if the other arguments' fake mode rejects real tensors."""
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


# ------------------------------------------------------------------------------------------------------------ forward


def linear(
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    tokens: Tensor | None,
    sites: list[Tensor],
    layout: str,
    tp: str,
    keeps: bool,
    training: bool,
    when: str,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns y [..., N]; codes and scales of x's columnwise sides as InputLayout has them (empty unless ``keeps``); the
    tensors of ``stamps_to_tensors``; the tensors of ``DeferredRecord.to_tensors`` (empty unless ``when`` is LATER).

    Args:
        x, bias: [..., K], [N] or None.
        weights: [N, K] each: a linear's, or the experts'.
        tokens: integers [experts] on the CPU, each expert's tokens; None for a linear.
        sites: int64 [] on the CPU each, GemmSites' handles.
        layout: the sites' common saved_layout (GemmSite), or ''.
        tp: the communication, from TensorParallel.to_text.
        keeps: return x's codes for wgrad.
        training, when: the layer's mode; when to record the forward: NOW, LATER or NEVER.
        number: distinguishes calls; not read.
    """
    found = [_site_of(site) for site in sites]
    for site, weight in zip(found, weights, strict=True):
        if in_backward():
            _check_recomputed(site)
        else:
            site.store_weight_id(weight)
    counts = _numbers(found[0], tokens, x)
    call = Call(
        found,
        training,
        [not training] * len(found),
        not keeps,
        TensorParallel.from_text(tp),
        counts,
        as_operator=True,
    )
    options: Any = {"training": training, "when": when}
    with count_forward(found, call.split(x), weights, **options) as (record, deferred):
        done = forward(x, weights, bias, call._replace(record=record), [keeps] * len(found))
    stamps = stamps_to_tensors([Stamp.of(site.weights, training) for site in found], x.device)
    saved = SavedInput(x.new_empty(0), x.new_empty(0))
    if keeps:
        saved = InputLayout(SideLayout.parse(layout), x.shape[-1]).pack(done.x, counts, x.device)
    late = DeferredRecord.empty(x, 0) if deferred is None else deferred.to_tensors()
    return done.y, *saved, *stamps, *late


def _numbers(site: GemmSite, tokens: Tensor | None, x: Tensor) -> list[int]:
    """Each site's number of tokens; for a linear all tokens of x [..., features]."""
    if tokens is None:
        return [math.prod(x.shape[:-1])]
    numbers: list[int] = tokens.tolist()
    check_numbers(site.plan.name, numbers, len(x))
    return numbers


def _fake_linear(x, weights, bias, tokens, sites, layout, tp, keeps, training, when, number):
    parallel, experts = TensorParallel.from_text(tp), len(weights)
    shape = [*x.shape[:-1], weights[0].shape[0]]
    if parallel.sequence_parallel:
        shape[0] = shape[0] * parallel.size if parallel.kind == "column" else shape[0] // parallel.size
    saved = SavedInput(x.new_empty(0), x.new_empty(0))
    if keeps:
        saved_layout = InputLayout(SideLayout.parse(layout), x.shape[-1])
        saved = saved_layout.empty(math.prod(x.shape[:-1]), experts, x.device)
    stamps = torch.empty(experts, 2, dtype=torch.int64, device="cpu")
    scales = x.new_empty(experts, dtype=torch.float32)
    record = DeferredRecord.empty(x, experts if when == LATER else 0)
    return x.new_empty(shape), *saved, stamps, scales, *record


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, bias, tokens, sites, layout, tp, keeps, *_, number = inputs
    _, codes, scales, *about_forward = output
    needs_wgrad = any(ctx.needs_input_grad[1 : 1 + len(weights)])  # here it is flat
    kept = [codes, scales] if keeps else [x] if needs_wgrad else []
    ctx.save_for_backward(tokens, *about_forward, *weights, *sites, *kept)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(codes, scales, *about_forward)
    ctx.arguments = (layout, tp, number)
    ctx.bias_dtype = None if bias is None else bias.dtype


# ----------------------------------------------------------------------------------------------------------- backward


def linear_backward(
    dy: Tensor,
    kept: list[Tensor],
    weights: list[Tensor],
    tokens: Tensor | None,
    stamps: Tensor,
    weight_scales: Tensor,
    measured: Tensor,
    counted: Tensor,
    sites: list[Tensor],
    layout: str,
    tp: str,
    number: int,
    needs_dgrad: bool,
    needs_wgrad: list[bool],
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Returns [dx [..., K], dbias [N], dw [N, K] of each weight]; gradients that are not needed are empty.

    Args:
        dy, weights: [..., N]; [N, K] each.
        kept: the saved input: codes and scales, or x [..., K]; empty without any dw.
        stamps, weight_scales: int64 [sites, 2] and float32 [sites], how forward quantized the weights
            (``stamps_to_tensors``).
        measured, counted: float32 [sites, 2, 2] and int64 [7], forward's deferred record, or empty.
        bias_dtype: None if dbias is not needed.
        tokens, sites, layout, tp, number: as in ``linear``.
    """
    found = [_site_of(site) for site in sites]
    counts, fresh = _numbers(found[0], tokens, dy), [False] * len(found)
    of_forward = stamps_from_tensors(stamps, weight_scales)
    call = Call(found, of_forward[0].training, fresh, len(kept) == 1, TensorParallel.from_text(tp), counts)
    parameters = [site.parameter(weight) for site, weight in zip(found, weights, strict=True)]
    found[0].state.activity.backwards += 1
    if len(counted):
        DeferredRecord.from_tensors(measured, counted).record(found)
    with without_autocast(dy.device):
        saved_w: list[Operand | None] = [None] * len(found)
        if needs_dgrad:
            about = zip(found, weights, of_forward, strict=True)
            saved_w = [columnwise_of(site.weights, weight, stamp) for site, weight, stamp in about]
        saved_x: list[Operand | None] = [None] * len(found)
        if len(kept) == 1:
            parts = call.split(kept[0].reshape(-1, kept[0].shape[-1]))
            saved_x = [part.t() if len(parts) == 1 or len(part) else None for part in parts]
        elif kept:
            saved_layout = InputLayout(SideLayout.parse(layout), weights[0].shape[1])
            saved_x = saved_layout.unpack(SavedInput(*kept), counts)
        done = backward(dy, saved_x, saved_w, parameters, call, needs_dgrad, needs_wgrad, bias_dtype)
    dx = None if done.dx is None else done.dx.view(*_dx_shape(dy, call.tp), weights[0].shape[1])
    return [dy.new_empty(0) if grad is None else grad for grad in (dx, done.dbias, *done.dw)]


def _fake_backward(dy, kept, weights, *others):
    *_, tp, _, needs_dgrad, needs_wgrad, bias_dtype = others
    shape = [*_dx_shape(dy, TensorParallel.from_text(tp)), weights[0].shape[1]]
    dx = dy.new_empty(shape if needs_dgrad else 0)
    dbias = dy.new_empty(0) if bias_dtype is None else dy.new_empty(dy.shape[-1], dtype=bias_dtype)
    shapes = [weight.shape if needs else 0 for weight, needs in zip(weights, needs_wgrad, strict=True)]
    return [dx, dbias, *(weight.new_empty(shape) for weight, shape in zip(weights, shapes, strict=True))]


def _dx_shape(dy: Tensor, tp: TensorParallel) -> list[int]:
    """Leading dimensions of dx for dy [..., N]; sequence parallelism scales the first by the group size."""
    shape = list(dy.shape[:-1])
    if tp.sequence_parallel:
        shape[0] = shape[0] // tp.size if tp.kind == "column" else shape[0] * tp.size
    return shape


def _register(name: str) -> None:
    """Registers both operators under a name, with what compilers, autograd and FLOP counters need."""
    options: Any = {"mutates_args": (), "tags": TAGS}
    operator = torch.library.custom_op(f"megatron_fp8::{name}", linear, **options)
    in_backward_pass = torch.library.custom_op(f"megatron_fp8::{name}_backward", linear_backward, **options)
    operator.register_fake(_fake_linear)
    in_backward_pass.register_fake(_fake_backward)

    def differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
        needs_dgrad, needs_wgrad, needs_dbias, *_ = ctx.needs_input_grad
        count = len(needs_wgrad)
        tokens, stamps, weight_scales, measured, counted, *others = ctx.saved_tensors
        weights, sites, kept = others[:count], others[count : 2 * count], others[2 * count :]
        about_forward = tokens, stamps, weight_scales, measured, counted, sites, *ctx.arguments
        bias_dtype = ctx.bias_dtype if needs_dbias else None
        dx, dbias, *dw = in_backward_pass(
            dy, kept, weights, *about_forward, needs_dgrad, list(needs_wgrad), bias_dtype
        )
        wanted = [grad if needs else None for grad, needs in zip(dw, needs_wgrad, strict=True)]
        of_bias = dbias if needs_dbias else None
        return dx if needs_dgrad else None, wanted, of_bias, None, [None] * count, *[None] * 6

    operator.register_autograd(differentiate, setup_context=_save)

    @register_flop_formula(getattr(torch.ops.megatron_fp8, name))
    def _(x_shape, weight_shapes, *_, **__):
        """One weight for each token."""
        return 2 * math.prod(x_shape) * weight_shapes[0][0]

    @register_flop_formula(getattr(torch.ops.megatron_fp8, f"{name}_backward"))
    def _(dy_shape, kept, weight_shapes, *others, **__):
        """One GEMM for dx and one for dw, where needed."""
        *_, needs_dgrad, needs_wgrad, _ = others
        return 2 * math.prod(dy_shape) * weight_shapes[0][1] * (needs_dgrad + any(needs_wgrad))


_register("linear")
_register("grouped_linear")


# ----------------------------------------------------------------------------------- amaxes in high precision

# They record amaxes for delayed scaling, and return a copy of the result, so that no compiler drops the recording.


def traced_observation(x: Tensor, weight: Tensor, y: Tensor, site: GemmSite, *, training: bool) -> Tensor:
    """observe_high_precision while traced: records x [..., K], weight [N, K]; returns a copy of y [..., N]."""
    handle = match_fake_mode(site.handle, x, weight)
    return torch.ops.megatron_fp8.observe(x, weight, y, handle, training, next_call())[0]


@torch.library.custom_op("megatron_fp8::observe", mutates_args=(), tags=TAGS)
def observe(
    x: Tensor, weight: Tensor, y: Tensor, site: Tensor, training: bool, number: int
) -> tuple[Tensor, Tensor]:
    """Returns a copy of y [..., N], and the amax of x [..., K] (float32 []).

    In training it records the amaxes of x and weight [N, K].
    """
    amax = measure(x)[0].clone()
    if training:
        observe_forward(site_by_handle(site), amax, weight)
    return y.clone(), amax


@observe.register_fake
def _(x, weight, y, site, training, number):
    return y.clone(), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("megatron_fp8::observe_backward", mutates_args=(), tags=TAGS)
def observe_backward(
    dy: Tensor, weight: Tensor, amax: Tensor, site: Tensor, training: bool, number: int
) -> Tensor:
    """Returns a copy of dy [..., N] and records its amax; in evaluation also ``amax`` (float32 [], x's) and weight's."""
    found = site_by_handle(site)
    found.state.activity.backwards += 1
    if not training:
        observe_forward(found, amax, weight)
    record_gradient(found, dy)
    return dy.clone()


@observe_backward.register_fake
def _(dy, weight, amax, site, training, number):
    return dy.clone()


def _save_site(ctx: Any, inputs: Any, output: Any) -> None:
    _, weight, _, site, ctx.training, ctx.number = inputs
    ctx.save_for_backward(weight, output[1], site)
    ctx.mark_non_differentiable(output[1])


def _pass_observed(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    passed = torch.ops.megatron_fp8.observe_backward(dy, *ctx.saved_tensors, ctx.training, ctx.number)
    return None, None, passed, None, None, None


torch.library.register_autograd("megatron_fp8::observe", _pass_observed, setup_context=_save_site)


# ------------------------------------------------------------------------------------------------ before the trace


@torch.compiler.assume_constant_result
def prepare_layer(layer: Any) -> bool:
    """Calls layer.make_sites() during tracing, untraced; restarts the trace if that made any site.

    The trace has already read that there are no sites. At a graph break Dynamo traces the function again and fails if it
    reads another value. A graph that starts with sites is shared by all layers of one structure.
    """
    if layer.make_sites():
        raise UnspecializeRestartAnalysis(restart_reason="FP8 layers were prepared")
    return True


def _site_of(handle: Tensor) -> GemmSite:
    """The site of a handle, int64 []. RuntimeError if this torch captures the operator: a replay skips its Python."""
    site = site_by_handle(handle)
    captured = (
        not _KEPT_OUT_OF_GRAPHS and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
    if captured and not site.state.capturing:
        raise RuntimeError(
            'this version of torch puts FP8 operators into the CUDA graphs of mode="reduce-overhead", though they keep'
            " state on the host: compile without that mode, or capture the step (state.cuda_graph.CapturedStep)"
        )
    return site


def _check_recomputed(site: GemmSite) -> None:
    """RuntimeError if a recomputation reaches a site whose forward never ran."""
    if not site.has_run:
        raise RuntimeError(
            f"{site.plan.name}: FP8 was switched off, or to another recipe, around a compiled forward, and its"
            " recomputation, which finds what is said in the backward, would not run so: checkpoint"
            " megatron_fp8.plan.autocast_state.remember_fp8(function) in place of the compiled function"
        )

"""The linears of a layer's experts, with their products in one call.

    fprop  y_e [T_e, N]  = x_e  [T_e, K]   @ w_e  [N, K]^T
    dgrad  dx_e [T_e, K] = dy_e [T_e, N]   @ w_e  [N, K]           for every expert e, whose T_e tokens lie together
    wgrad  dw_e [N, K]   = dy_e [T_e, N]^T @ x_e  [T_e, K]

A grouped linear is a list of GEMM sites, one for each expert: each has its own plan, quantizers, slots and kept weight,
as a linear that is called alone. So no amax is shared between experts, no block of a scale straddles two, and codes,
histories, checkpoints and reports are those of the experts called one after the other, to the bit. What is gained are
the calls: a backend's ``grouped_gemm`` multiplies all experts in one, and the emulated one casts what is cast in a
forward, and in a backward, in one (``cast_each``). Where nothing sets an expert apart, Python does little for each
(cpu_expert_batch.py). Of an expert without tokens nothing is cast but the weight, whose amax a history may want, and
nothing is multiplied. Experts that a plan or an experiment treats in another way (one of them in BF16, a gradient in high
precision) are multiplied alone, beside the others.

grouped_ops.py computes; this file is its autograd function. While torch.compile traces, or a dispatch mode is on, the
same passes are two opaque operators (compiled_grouped.py), to which the numbers of tokens are a tensor that nobody reads
before they run.

Rejected: one site with a weight [experts, N, K]. Its quantizers, histories, FP8 parameter, main_grad and checkpoint
would each need a second form with a dimension more, to hold what a list holds as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ..params.fp8_parameter import Fp8Parameter
from ..plan.autocast_state import without_autocast
from ..state.iteration import recorded
from ..tensor import Operand, Sides
from . import cpu_expert_batch
from .amax_recorder import DeferredRecord, came_back, counted_forward
from .dgrad_weight import columnwise_of, stamp_of
from .double_backward_guard import first_derivative_only
from .function import check_devices, refuse_tangents, refuse_tracers
from .gemm_site import GemmSite
from .grouped_ops import Group, check_numbers, forward, gradients
from .linear_ops import Call, for_gradient
from .quantized_activation import QuantizedActivation
from .saved_operands import AGAIN, SavedOperand, given_back, save
from .tensor_parallel import ALONE

Tokens = Sequence[int] | torch.Tensor
"""Each expert's number of tokens: whole numbers, or an integer tensor [experts], best on the CPU: there it is read."""


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
    _check(x, weights, tokens, sites)
    refuse_tracers(sites[0])
    fresh = [False] * len(sites) if fresh_weights is None else list(fresh_weights)
    eager = (x, weights, tokens, sites, training, fresh, save_original_input)
    in_codes = isinstance(x, QuantizedActivation) or any(
        isinstance(weight, Fp8Parameter) for weight in weights
    )
    if torch.compiler.is_compiling():
        from .compiled import break_graph  # loads torch's compiler
        from .compiled_grouped import traced_grouped_linear

        if in_codes:
            done: torch.Tensor = break_graph(_eager_grouped_linear, *eager)
            return done
        return traced_grouped_linear(x, weights, tokens, sites, training, save_original_input)
    # Every site is asked: each remembers what it answered.
    watched = [site.forwards.as_operator(x, weight) for site, weight in zip(sites, weights, strict=True)]
    if any(watched):
        if in_codes:
            with _disable_current_modes():
                return _eager_grouped_linear(*eager)
        from .compiled_grouped import traced_grouped_linear  # loads torch's compiler

        return traced_grouped_linear(x, weights, tokens, sites, training, save_original_input)
    return _eager_grouped_linear(*eager)


def _eager_grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tokens: Tokens,
    sites: Sequence[GemmSite],
    training: bool,
    fresh: Sequence[bool],
    save_original_input: bool,
) -> torch.Tensor:
    numbers = on_host(tokens)
    check_numbers(sites[0].plan.name, numbers, len(x))
    when = recorded(training, x, *weights)
    with (
        counted_forward(sites, x.split(numbers), weights, training=training, when=when) as (record, late),
        without_autocast(x.device),
    ):
        calls = tuple(
            Call(site, ALONE, training, record, again, save_original_input)
            for site, again in zip(sites, fresh, strict=True)
        )
        return _grouped_linear(x, weights, Group(calls, tuple(numbers)), late)


def _grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], group: Group, late: DeferredRecord | None
) -> torch.Tensor:
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return _GroupedFunction.apply(x, _Way(group, torch.is_grad_enabled(), late), *weights)
    y = forward(x, weights, group, [False] * len(weights)).y
    _forget(group)
    return y


def on_host(tokens: Tokens) -> list[int]:
    """The numbers, which the host waits for if they are on a GPU."""
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)


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


def _check(
    x: torch.Tensor, weights: Sequence[torch.Tensor], tokens: Tokens, sites: Sequence[GemmSite]
) -> None:
    """All but the numbers themselves, which a tracer does not know."""
    name = sites[0].plan.name if sites else "grouped_linear"
    if not len(weights) == len(tokens) == len(sites) > 0:
        raise ValueError(
            f"{name}: {len(weights)} weights, {len(tokens)} numbers of tokens and {len(sites)} sites: one of each for"
            " every expert is needed"
        )
    for site, weight in zip(sites, weights, strict=True):
        check_devices(site, x, weight, None)
    if x.ndim != 2 or any(
        weight.ndim != 2 or weight.shape != weights[0].shape or weight.shape[1] != x.shape[1]
        for weight in weights
    ):
        raise ValueError(
            f"{name}: input {tuple(x.shape)} and weights {sorted({tuple(w.shape) for w in weights})}: tokens [T, K] and"
            " weights that are all [N, K] are needed"
        )


class _Way(NamedTuple):
    """Options of a forward: the experts' calls, whether gradients are enabled, its late record."""

    group: Group
    grad_enabled: bool
    late: DeferredRecord | None


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, way: _Way, *weights: torch.Tensor) -> torch.Tensor:
        needs_dgrad, _, *needs_wgrad = (need and way.grad_enabled for need in ctx.needs_input_grad)
        ctx.group, ctx.weights, ctx.stacked = way.group, [for_gradient(weight) for weight in weights], None
        ctx.late = way.late
        done = forward(x, weights, way.group, needs_wgrad)
        if isinstance(done.weights, cpu_expert_batch.Operands):
            ctx.stacked, tensors = cpu_expert_batch.Saved(done.x, done.weights).taken_apart()  # type: ignore[arg-type]
            save(ctx, tensors)
            return done.y
        assert isinstance(done.x, list)
        of_x = [SavedOperand.of(side) for side in done.x]
        saved = [*of_x, *_kept_weights(weights, done.weights, way.group, needs_dgrad)]
        _forget(way.group)
        ctx.kept = [(len(kept.tensors), kept.spec) for kept in saved]
        save(ctx, [tensor for kept in saved for tensor in kept.tensors])
        return done.y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = ctx.group.calls[0]
        came_back(call.site.state)
        if ctx.late is not None:
            ctx.late.record(ctx.group.sites)
        with without_autocast(grad_output.device):
            needs_dgrad, _, *needs_wgrad = ctx.needs_input_grad
            saved = _restored(ctx, given_back(ctx, call.site.plan.name))
            dx, grads = gradients(grad_output, *saved, ctx.weights, ctx.group, needs_dgrad, needs_wgrad)
            return dx, None, *grads

    jvp = staticmethod(refuse_tangents)


def _kept_weights(
    weights: Sequence[torch.Tensor], sides: Sequence[Sides], group: Group, needs_dgrad: bool
) -> list[SavedOperand]:
    """dgrad's operand of each expert; of one that backward makes again, what it is made of."""
    found = []
    for weight, side, call in zip(weights, sides, group.calls, strict=True):
        if needs_dgrad and side.columnwise is None:
            stamp = stamp_of(call.site.weights, weight.device, training=call.training)
            found.append(SavedOperand((weight, *stamp), AGAIN))
        else:
            found.append(SavedOperand.of(side.columnwise if needs_dgrad else None))
    return found


def _forget(group: Group) -> None:
    """Where weights are not kept the next call quantises them again; what backward needs was saved."""
    for site in group.sites:
        if not site.state.keeps_weights:
            site.weights.forget()


def _restored(ctx: Any, tensors: list[torch.Tensor]) -> tuple[Any, Any]:
    """The operands that forward kept, of tokens and of weights."""
    if ctx.stacked is not None:
        x, weights = ctx.stacked.put_together(tensors)
        return x, weights
    found: list[Operand | None] = []
    count = len(ctx.group.calls)
    for i, (number, spec) in enumerate(ctx.kept):
        these, tensors = tensors[:number], tensors[number:]
        if spec == AGAIN:
            found.append(columnwise_of(ctx.group.calls[i - count].site.weights, *these))
        else:
            found.append(SavedOperand.restore(spec, these))
    return found[:count], found[count:]

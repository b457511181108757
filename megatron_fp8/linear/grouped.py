"""The linears of a layer's experts, each on tokens of its own, with their products in one call.

    fprop  y_e [T_e, N]  = x_e  [T_e, K]   @ w_e  [N, K]^T
    dgrad  dx_e [T_e, K] = dy_e [T_e, N]   @ w_e  [N, K]           for every expert e, whose T_e tokens lie together
    wgrad  dw_e [N, K]   = dy_e [T_e, N]^T @ x_e  [T_e, K]

A grouped linear is a list of GEMM sites, one for each expert: each has its own plan, quantizers, slots and kept weight,
as a linear that is called alone. So no amax is shared between experts, no block of a scale straddles two, and codes,
histories, checkpoints and reports are those of the experts called one after the other, to the bit. What is gained are
the calls: a backend's ``grouped_gemm`` multiplies all experts in one, and the emulated one casts what is cast in a
forward, and in a backward, in one (``cast_each``). Where nothing sets an expert apart, Python does little for each
(stacked.py). Of an expert without tokens nothing is cast but the weight, whose amax a history may want, and nothing is
multiplied. Experts that a plan or an experiment treats in another way (one of them in BF16, a gradient in high precision)
are multiplied alone, beside the others.

Rejected: one site with a weight [experts, N, K]. Its quantizers, histories, FP8 parameter, main_grad and checkpoint
would each need a second form with a dimension more, to hold what a list holds as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ..plan.switch import in_recompute, without_autocast
from ..quantizer import Wanted, cast_each
from ..state.observer import SeenProduct
from ..tensor import Operand, Sides
from . import stacked
from .coded_tokens import CodedTokens
from .derivative import first_derivative_only
from .function import AGAIN, Kept, fp8_linear, given_back, refuse_tangents, refuse_tracers, save
from .passes import (
    Call,
    gradient_cast,
    gradient_operands,
    input_cast,
    input_operands,
    quantize_grad_output,
    quantize_input,
    requantize_input,
)
from .site import GemmSite
from .tensor_parallel import TensorParallel
from .weight_again import columnwise_of, stamp_of

_ALONE = TensorParallel()


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tokens: Sequence[int],
    sites: Sequence[GemmSite],
    *,
    training: bool = True,
    fresh_weights: Sequence[bool] | None = None,
    save_original_input: bool = False,
) -> torch.Tensor:
    """y_e = x_e @ weight_e^T for every expert e, with the GEMMs of ``sites[e]``; the bits of ``fp8_linear`` of each.

    Args:
        x: [T, K], the tokens of all experts, expert by expert; CodedTokens are multiplied as they are.
        weights: [N, K] each; one with ``main_grad`` has its gradient added there, as of ``fp8_linear``.
        tokens: T_e, any of which may be 0.
        sites: the experts' GEMMs.
        training, save_original_input: as of ``fp8_linear``.
        fresh_weights: as its fresh_weight, of each expert.

    Returns:
        [T, N] in x's dtype. NaN and Inf as of ``fp8_linear``: those of one expert stay in its rows.

    Raises:
        ValueError: tokens do not sum to T, x's last dimension is not the weights', or lists differ in length.
        RuntimeError: it is being exported or jit-traced, or transformed by torch.func.
    """
    _check(x, weights, tokens, sites)
    fresh = [False] * len(sites) if fresh_weights is None else list(fresh_weights)
    # Every site is asked: each remembers what it answered.
    watched = [site.forwards.as_operator(x, w) for site, w in zip(sites, weights, strict=True)]
    if torch.compiler.is_compiling() or any(watched):  # a tracer sees one operator for each expert
        done = [
            fp8_linear(
                part,
                weight,
                None,
                site,
                training=training,
                fresh_weight=again,
                save_original_input=save_original_input,
            )
            for part, weight, site, again in zip(x.split(list(tokens)), weights, sites, fresh, strict=True)
        ]
        return torch.cat(done)
    refuse_tracers(sites[0])
    record = training and not in_recompute()
    calls = tuple(
        Call(site, _ALONE, training, record, again, save_original_input)
        for site, again in zip(sites, fresh, strict=True)
    )
    group = _Group(calls, tuple(tokens), torch.is_grad_enabled())
    with without_autocast(x.device):
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            return _GroupedFunction.apply(x, group, *weights)
        if kept := stacked.weights_of(x, weights, calls, [False]):
            return stacked.forward(x, weights, calls, tokens, kept, needs_wgrad=False)[0]
        return _forward(x, weights, group, [False] * len(weights), False).y


def some_together(
    x: torch.Tensor,
    tokens: Sequence[int],
    joins: Sequence[bool],
    together: Callable[[list[int], torch.Tensor], torch.Tensor],
    alone: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[T, N] of tokens [T, K], where only some experts can be multiplied in one call.

    Args:
        tokens: T_e, in order.
        joins: whether an expert can be.
        together: gives the rows of these experts, of their tokens one after the other.
        alone: gives one expert's.
    """
    if all(joins):
        return together(list(range(len(tokens))), x)
    parts = x.split(list(tokens))
    done = {e: alone(e, parts[e]) for e, joined in enumerate(joins) if not joined}
    if these := [e for e, joined in enumerate(joins) if joined]:
        made = together(these, torch.cat([parts[e] for e in these]))
        done.update(zip(these, made.split([tokens[e] for e in these]), strict=True))
    return torch.cat([done[e] for e in range(len(tokens))])


class _Group(NamedTuple):
    """What one forward was called with, for each expert."""

    calls: tuple[Call, ...]
    tokens: tuple[int, ...]
    grad_enabled: bool

    @property
    def sites(self) -> list[GemmSite]:
        return [call.site for call in self.calls]


def _check(
    x: torch.Tensor, weights: Sequence[torch.Tensor], tokens: Sequence[int], sites: Sequence[GemmSite]
) -> None:
    name = sites[0].plan.name if sites else "grouped_linear"
    if not len(weights) == len(tokens) == len(sites) > 0:
        raise ValueError(
            f"{name}: {len(weights)} weights, {len(tokens)} numbers of tokens and {len(sites)} sites: one of each for"
            " every expert is needed"
        )
    if x.ndim != 2 or any(
        weight.ndim != 2 or weight.shape != weights[0].shape or weight.shape[1] != x.shape[1]
        for weight in weights
    ):
        raise ValueError(
            f"{name}: input {tuple(x.shape)} and weights {sorted({tuple(w.shape) for w in weights})}: tokens [T, K] and"
            " weights that are all [N, K] are needed"
        )
    if not all(isinstance(count, int) for count in tokens):
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} must be whole numbers: use tokens.tolist() of int64"
        )
    if min(tokens) < 0 or sum(tokens) != len(x):
        raise ValueError(
            f"{name}: numbers of tokens {list(tokens)} sum to {sum(tokens)}, and the input has {len(x)} rows: they say"
            " how many rows each expert has, in order"
        )


class _Forward(NamedTuple):
    """y; of each expert, what its backward needs: wgrad's and dgrad's operands, taken apart."""

    y: torch.Tensor
    kept: list[Kept]


def _forward(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    group: _Group,
    needs_wgrad: Sequence[bool],
    needs_dgrad: bool,
) -> _Forward:
    parts = x.split(list(group.tokens))
    done = _cast(parts, weights, group, needs_wgrad)
    operands: list[Operand] = []
    coded: list[Operand] = []
    kept_x, kept_w = [], []
    for weight, call, (operand, saved, sides) in zip(weights, group.calls, done, strict=True):
        site = call.site
        assert sides.rowwise is not None
        operands.append(operand)
        coded.append(sides.rowwise)
        kept_x.append(Kept.of(saved))
        if needs_dgrad and sides.columnwise is None:
            stamp = stamp_of(site.weights, x.device, training=call.training)
            kept_w.append(Kept((weight, *stamp), AGAIN))
        else:
            kept_w.append(Kept.of(sides.columnwise if needs_dgrad else None))
        if not site.state.keeps_weights:
            site.weights.forget()  # the next call quantises again; what backward needs is kept here
    y = torch.empty(len(x), weights[0].shape[0], dtype=x.dtype, device=x.device)
    _multiply(
        "fprop",
        group.sites,
        group.tokens,
        operands,
        coded,
        y.split(list(group.tokens)),
        group.calls[0].record,
    )
    return _Forward(y, [*kept_x, *kept_w])


def _cast(
    parts: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    group: _Group,
    needs_wgrad: Sequence[bool],
) -> list[tuple[Operand, Operand | None, Sides]]:
    """Of each expert what ``quantize_input`` gives of its tokens (none: themselves), and its weight; cast in one call."""
    wanted: list[Wanted] = []
    operands: list[tuple[Operand, Operand | None]] = []
    uncast: list[torch.Tensor | None] = []
    ready: list[Sides | None] = []
    for part, weight, call, needs in zip(parts, weights, group.calls, needs_wgrad, strict=True):
        site, plain = call.site, None
        site.note_forward()
        operands.append((part, None))
        if _is_coded(part):
            operands[-1] = quantize_input(part, call, needs)
        elif len(part):
            cast, plain = input_cast(part, call, needs)
            wanted.append(cast)
        uncast.append(plain)
        ready.append(site.weights.ready(weight, fresh=call.fresh_weight, record=call.record))
        if ready[-1] is None:
            wanted.append(Wanted(site.weights.casts, weight, site.weights.direction, call.record))
    found: list[tuple[Operand, Operand | None, Sides]] = []
    with torch.inference_mode(False), torch.no_grad():  # codes that a later backward can save
        made = iter(cast_each(wanted))
        for e, (part, weight, call) in enumerate(zip(parts, weights, group.calls, strict=True)):
            if len(part) and not _is_coded(part):
                operands[e] = input_operands(part, call, next(made), uncast[e])
            sides = ready[e] or call.site.weights.take(weight, next(made), record=call.record)
            found.append((*operands[e], sides))
    return found


def _is_coded(part: torch.Tensor) -> bool:
    """Whether an expert's tokens came as codes, of which wgrad's are derived one expert after the other."""
    return isinstance(part, CodedTokens) and len(part) > 0


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: _Group, *weights: torch.Tensor) -> torch.Tensor:
        needs_dgrad, _, *needs_wgrad = (need and group.grad_enabled for need in ctx.needs_input_grad)
        ctx.group, ctx.weights, ctx.stacked = group, weights, None
        calls, tokens = group.calls, group.tokens
        if kept := stacked.weights_of(x, weights, calls, needs_wgrad):
            y, saved = stacked.forward(x, weights, calls, tokens, kept, needs_wgrad=needs_wgrad[0])
            ctx.stacked, tensors = saved.taken_apart()
            save(ctx, tensors)
            return y
        done = _forward(x, weights, group, needs_wgrad, needs_dgrad)
        ctx.kept = [(len(kept.tensors), kept.spec) for kept in done.kept]
        save(ctx, [tensor for kept in done.kept for tensor in kept.tensors])
        return done.y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        training = ctx.group.calls[0].training
        state = ctx.group.calls[0].site.state
        with without_autocast(grad_output.device), nullcontext() if training else state.uncounted():
            return _gradients(ctx, grad_output)

    jvp = staticmethod(refuse_tangents)


def _gradients(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    group: _Group = ctx.group
    calls, tokens = group.calls, list(group.tokens)
    needs_dgrad, _, *needs_wgrad = ctx.needs_input_grad
    kept = given_back(ctx, group.sites[0].plan.name)
    if ctx.stacked is not None:
        of = ctx.stacked.put_together(kept)
        if stacked.can_go_back(grad_output, of, calls):
            return stacked.gradients(grad_output, of, ctx.weights, calls, tokens, needs_dgrad, needs_wgrad)
        saved = of.of_experts()
    else:
        saved = _restored(ctx, kept)
    saved_x, saved_w = saved[: len(calls)], saved[len(calls) :]
    operands = _cast_gradients(grad_output.split(tokens), calls, needs_dgrad, needs_wgrad)
    rowwise, columnwise = [row for row, _ in operands], [column for _, column in operands]
    for e, call in enumerate(calls):
        if needs_wgrad[e] and isinstance(plain := saved_x[e], torch.Tensor):
            saved_x[e] = requantize_input(plain, call)
    record = calls[0].training
    dx = None
    if needs_dgrad:
        cols = ctx.weights[0].shape[1]
        dx = torch.empty(len(grad_output), cols, dtype=grad_output.dtype, device=grad_output.device)
        _multiply("dgrad", group.sites, tokens, rowwise, saved_w, dx.split(tokens), record)
    wanted = [e for e, needs in enumerate(needs_wgrad) if needs]

    def multiply(these: list[int], outs: list[Any], add: bool) -> None:
        sites, counts = [group.calls[e].site for e in these], [tokens[e] for e in these]
        a, b = [columnwise[e] for e in these], [saved_x[e] for e in these]
        _multiply("wgrad", sites, counts, a, b, outs, record, add=add)

    return dx, None, *stacked.each_weight_gradient(ctx.weights, calls, wanted, multiply)


def _cast_gradients(
    parts: Sequence[torch.Tensor], calls: Sequence[Call], needs_dgrad: bool, needs_wgrad: Sequence[bool]
) -> list[tuple[Any, Any]]:
    """``quantize_grad_output`` of each expert, [T_e, N] and [N, T_e]; cast in one call, where rounding is not random."""
    found: list[tuple[Any, Any]] = [(None, None)] * len(parts)
    wanted = {}
    for e, (part, call, needs) in enumerate(zip(parts, calls, needs_wgrad, strict=True)):
        # Each backward has random bits of its own, an idle one too.
        if call.site.gradients.stochastic or _is_coded(part):
            found[e] = quantize_grad_output(part, call, needs_dgrad, needs)
        elif len(part):
            wanted[e] = gradient_cast(part, call, needs_dgrad, needs)
    for (e, cast), done in zip(wanted.items(), cast_each(list(wanted.values())), strict=True):
        found[e] = gradient_operands(cast, done, needs_dgrad, needs_wgrad[e])
    return found


def _restored(ctx: Any, tensors: list[torch.Tensor]) -> list[Operand | None]:
    """The operands that forward kept, wgrad's and then dgrad's of each expert."""
    found: list[Operand | None] = []
    for i, (count, spec) in enumerate(ctx.kept):
        these, tensors = tensors[:count], tensors[count:]
        if spec == AGAIN:
            found.append(columnwise_of(ctx.group.calls[i - len(ctx.group.calls)].site.weights, *these))
        else:
            found.append(Kept.restore(spec, these))
    return found


def _multiply(
    gemm: str,
    sites: Sequence[GemmSite],
    tokens: Sequence[int],
    a: Sequence[Operand],
    b: Sequence[Any],
    outs: Sequence[Any],
    record: bool,
    *,
    add: bool = False,
) -> None:
    """outs[e] = a[e] @ b[e]^T (add: +=) as each site's plan has it; those of one backend in FP8 in one call.

    An expert without tokens is left out: it has no rows, or, in wgrad, a gradient of zeros.
    """
    together: dict[ModuleType, list[int]] = {}
    for e, site in enumerate(sites):
        if not tokens[e]:
            if gemm == "wgrad" and not add:
                outs[e].zero_()
        elif (
            site.plan.gemms[gemm] == "fp8" and site.backend is not None and not (add and site.state.observer)
        ):
            together.setdefault(site.backend, []).append(e)
        elif add:
            site.accumulate(gemm, a[e], b[e], outs[e], record=record)
        else:
            outs[e].copy_(site.multiply(gemm, a[e], b[e], outs[e].dtype, record=record))
    for backend, these in together.items():
        backend.grouped_gemm(
            [a[e] for e in these],
            [b[e] for e in these],
            [outs[e] for e in these],
            add=add,
            fast_accumulation=gemm == "fprop",
        )
        for e in these:
            site = sites[e]
            site.state.counts.fp8_gemms += 1
            if (observer := site.state.observer) is not None:
                observer.product(SeenProduct(site.plan.name, gemm, a[e], b[e], outs[e], record))

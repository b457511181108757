"""A layer's experts as two operators, for torch.compile and dispatch modes.

    grouped_linear           y, codes, scales, stamps, scale, ...  =  x, weights, counts, sites
    grouped_linear_backward  dx, dw of each weight            =  dy, (x | codes, scales), weights, counts, stamps, ...

How many tokens each expert gets is a tensor on the CPU, which is read as an operator runs: a graph holds for all numbers,
and knows only how many tokens there are together. So what is saved of them lies in two tensors of known sizes
(saved_expert_activations.py). All else is as compiled.py says: what crosses as an argument, what a graph does not see,
what was rejected.

Experts that save by other layouts than each other, one of them with another recipe or with wgrad in high precision, save
the tokens themselves, from which wgrad's codes are made in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..plan.autocast_state import without_autocast
from ..state.iteration import LATER, in_backward, recorded
from ..tensor import Operand
from . import cpu_expert_batch
from .amax_recorder import DeferredRecord, came_back, counted_forward
from .compiled import (
    TAGS,
    beside,
    check_recomputed,
    empty_record,
    handle_for,
    next_call,
    saved_record,
    site_of,
)
from .dgrad_weight import columnwise_of, stamps_of, was_training
from .gemm_site import GemmSite
from .grouped_ops import Each, Forward, Group, check_numbers, forward, gradients
from .linear_ops import Call
from .saved_expert_activations import SavedExperts, SavedExpertsLayout
from .saved_tensor_layout import SideLayout
from .tensor_parallel import ALONE


def traced_grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    tokens: Sequence[int] | Tensor,
    sites: Sequence[GemmSite],
    training: bool,
    save_original_input: bool,
) -> Tensor:
    """grouped_linear while torch.compile traces, or under a dispatch mode; weights are quantised as by traced_linear."""
    layouts = {site.traced.saved_layout for site in sites}
    layout = layouts.pop() if len(layouts) == 1 else ""
    needs_wgrad = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    counts = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, dtype=torch.int64, device="cpu")
    y, *_ = torch.ops.megatron_fp8.grouped_linear(
        x,
        list(weights),
        beside(counts.to("cpu"), x, *weights),
        [handle_for(site, x, *weights) for site in sites],
        layout,
        needs_wgrad and bool(layout) and not save_original_input,
        training,
        recorded(training, x, *weights),
        next_call(),
    )
    made: Tensor = y
    return made


@torch.library.custom_op("megatron_fp8::grouped_linear", mutates_args=(), tags=TAGS)
def grouped_linear(
    x: Tensor,
    weights: list[Tensor],
    counts: Tensor,
    sites: list[Tensor],
    layout: str,
    keeps: bool,
    training: bool,
    when: str,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y [T, N] of x [T, K] and weights [N, K]; codes and scales of x's columnwise sides as SavedExpertsLayout has them,
    if ``keeps``, else empty; what ``stamps_of`` gives; and what ``DeferredRecord.saved`` does, or empty ones.

    Args:
        counts: whole numbers [experts] on the CPU, the tokens of each.
        sites: int64 [] each, their handles.
        layout: their saved_layout, if they have one in common.
        training, when, number: as of ``linear``.
    """
    found = [site_of(site) for site in sites]
    tokens = _numbers(found[0].plan.name, counts, len(x))
    for site, weight in zip(found, weights, strict=True):
        if in_backward():
            check_recomputed(site)
        else:
            site.traced.multiplied_by(weight)
    with (
        counted_forward(found, x.split(tokens), weights, training=training, when=when) as (record, late),
        without_autocast(x.device),
    ):
        calls = tuple(
            Call(site, ALONE, training, record, not training, False, traced=keeps) for site in found
        )
        done = forward(x, weights, Group(calls, tokens, holds=True), [keeps] * len(weights))
    stamps = stamps_of([site.weights for site in found], x.device, training=training)
    packed = _packed(done, x, tokens, layout) if keeps else _nothing(x)
    return done.y, *packed, *stamps, *saved_record(late, x)


def _numbers(name: str, counts: Tensor, rows: int) -> tuple[int, ...]:
    tokens = counts.tolist()
    check_numbers(name, tokens, rows)
    return tuple(tokens)


def _nothing(x: Tensor) -> SavedExperts:
    return SavedExperts(x.new_empty(0), x.new_empty(0))


def _packed(done: Forward, x: Tensor, tokens: Sequence[int], layout: str) -> SavedExperts:
    if isinstance(done.x, cpu_expert_batch.Operands):
        return cpu_expert_batch.packed(done.x)
    sides: Any = done.x
    return SavedExpertsLayout(SideLayout.parse(layout), x.shape[1]).pack(sides, tokens, x.device)


@grouped_linear.register_fake
def _(x, weights, counts, sites, layout, keeps, training, when, number):
    packed = _nothing(x)
    if keeps:
        packed = SavedExpertsLayout(SideLayout.parse(layout), x.shape[1]).empty(
            x.shape[0], len(weights), x.device
        )
    stamps = torch.empty(len(weights), 2, dtype=torch.int64, device="cpu")
    return (
        x.new_empty(x.shape[0], weights[0].shape[0]),
        *packed,
        stamps,
        x.new_empty(len(weights), dtype=torch.float32),
        *empty_record(x, len(weights) if when == LATER else 0),
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, counts, sites, layout, keeps, *_, number = inputs
    _, codes, scales, *about_forward = output
    needs_wgrad = any(ctx.needs_input_grad[1 : 1 + len(weights)])  # here it is flat
    kept = [codes, scales] if keeps else [x] if needs_wgrad else []
    ctx.save_for_backward(counts, *about_forward, *weights, *sites, *kept)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(codes, scales, *about_forward)
    ctx.arguments = (layout, number)


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    needs_dgrad, needs_wgrad, *_ = ctx.needs_input_grad
    experts = len(needs_wgrad)
    counts, stamps, weight_scales, measured, counted, *others = ctx.saved_tensors
    weights, handles, kept = others[:experts], others[experts : 2 * experts], others[2 * experts :]
    dx, *grads = torch.ops.megatron_fp8.grouped_linear_backward(
        dy,
        kept,
        weights,
        counts,
        stamps,
        weight_scales,
        measured,
        counted,
        handles,
        *ctx.arguments,
        needs_dgrad,
        list(needs_wgrad),
    )
    wanted = [grad if needs else None for grad, needs in zip(grads, needs_wgrad, strict=True)]
    return dx if needs_dgrad else None, wanted, None, [None] * experts, *[None] * 5


torch.library.register_autograd("megatron_fp8::grouped_linear", _differentiate, setup_context=_save)


@torch.library.custom_op("megatron_fp8::grouped_linear_backward", mutates_args=(), tags=TAGS)
def grouped_linear_backward(
    dy: Tensor,
    kept: list[Tensor],
    weights: list[Tensor],
    counts: Tensor,
    stamps: Tensor,
    weight_scales: Tensor,
    measured: Tensor,
    counted: Tensor,
    sites: list[Tensor],
    layout: str,
    number: int,
    needs_dgrad: bool,
    needs_wgrad: list[bool],
) -> list[Tensor]:
    """[dx [T, K], dw [N, K] of each weight]; what was not asked for is empty.

    Args:
        dy: [T, N].
        kept: codes and scales, or the tokens themselves, or nothing where there is no dw.
        stamps, weight_scales: how forward quantised the weights, and whether it was in training.
        measured, counted: what is to be recorded of forward, or empty.
        counts, sites, layout, number: as of ``grouped_linear``.
    """
    found = [site_of(site) for site in sites]
    training = was_training(stamps[0])
    calls = tuple(Call(site, ALONE, training, False, False, len(kept) == 1) for site in found)
    group = Group(calls, _numbers(found[0].plan.name, counts, len(dy)))
    parameters = [site.traced.parameter(weight) for site, weight in zip(found, weights, strict=True)]
    came_back(found[0].state)
    if len(counted):
        DeferredRecord.restored(measured, counted).record(found)
    with without_autocast(dy.device):
        as_one = len(set(needs_wgrad)) == 1 and cpu_expert_batch.alike(calls)
        held = cpu_expert_batch.weights_held(weights, stamps, calls) if as_one and needs_dgrad else None
        saved_w: Each | None = held
        if needs_dgrad and held is None:
            as_one, saved_w = False, _weights_again(group, weights, stamps, weight_scales)
        packed = SavedExpertsLayout(SideLayout.parse(layout), weights[0].shape[1]) if len(kept) == 2 else None
        saved_x = _saved_tokens(group, kept, packed, dy.dtype, as_one=as_one)
        dx, grads = gradients(dy, saved_x, saved_w, parameters, group, needs_dgrad, needs_wgrad)
    return [dy.new_empty(0) if grad is None else grad for grad in (dx, *grads)]


def _weights_again(
    group: Group, weights: Sequence[Tensor], stamps: Tensor, weight_scales: Tensor
) -> list[Operand | None]:
    """dgrad's operands of the weights, one by one."""
    parts = zip(group.sites, weights, stamps, weight_scales, strict=True)
    return [columnwise_of(site.weights, weight, stamp, scale) for site, weight, stamp, scale in parts]


def _saved_tokens(
    group: Group, kept: list[Tensor], packed: SavedExpertsLayout | None, dtype: torch.dtype, *, as_one: bool
) -> Each | None:
    """wgrad's operands of the tokens: None, the tokens themselves, or their codes; ``as_one`` these in a stack."""
    if packed is None:
        parts = [part for x in kept for part in x.split(list(group.tokens))]
        return [part.t() if len(part) else None for part in parts] or None
    whole = packed.checked(SavedExperts(*kept), group.tokens)
    if as_one:
        return cpu_expert_batch.unpacked(whole, packed.features, group.tokens, dtype, group.calls)
    return packed.unpack(whole, group.tokens)


@grouped_linear_backward.register_fake
def _(dy, kept, weights, *others):
    *_, needs_dgrad, needs_wgrad = others
    dx = dy.new_empty((dy.shape[0], weights[0].shape[1]) if needs_dgrad else (0,))
    parts = zip(weights, needs_wgrad, strict=True)
    return [dx, *(weight.new_empty(weight.shape) if needs else dy.new_empty(0) for weight, needs in parts)]


# ------------------------------------------------------------------------------------------------------------ FLOPs


@register_flop_formula(torch.ops.megatron_fp8.grouped_linear)
def _(x_shape, weight_shapes, *_, **__):
    """For torch.utils.flop_counter: each token by one expert's weight."""
    return 2 * math.prod(x_shape) * weight_shapes[0][0]


@register_flop_formula(torch.ops.megatron_fp8.grouped_linear_backward)
def _(
    dy_shape,
    kept,
    weight_shapes,
    counts,
    stamps,
    scales,
    measured,
    counted,
    sites,
    layout,
    number,
    needs_dgrad,
    needs_wgrad,
    *_,
    **__,
):
    """As much for each gradient that is wanted."""
    return 2 * math.prod(dy_shape) * weight_shapes[0][1] * (needs_dgrad + any(needs_wgrad))

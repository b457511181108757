"""A layer's experts as two operators, for torch.compile and dispatch modes.

    grouped_linear           y, codes, scales, stamps, scale, ...  =  x, weights, counts, sites
    grouped_linear_backward  dx, dw of each weight            =  dy, (x | codes, scales), weights, counts, stamps, ...

The tokens per expert are a tensor on the CPU that an operator reads as it runs, so one graph serves all counts: it knows
only the total number of tokens. The saved activations are two tensors whose sizes depend on that total alone
(saved_expert_activations.py). Arguments, side effects and rejected designs are compiled.py's.

Where experts' saved layouts differ (another recipe, or wgrad in high precision), the operator saves the tokens in high
precision, and backward quantises them for wgrad.
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
    """grouped_linear while torch.compile traces, or under a dispatch mode: y [T, N] of x [T, K] and weights [N, K].

    ``tokens``: per expert, also as an integer tensor [experts]. Weights are quantised as in traced_linear.
    """
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
    """Returns y [T, N]; flat codes and scales of x's columnwise sides (SavedExpertsLayout; empty unless ``keeps``); the
    tensors of ``stamps_of``; the tensors of ``DeferredRecord.saved`` (empty unless ``when`` is LATER).

    Args:
        x: [T, K].
        weights: [N, K] each.
        counts: integers [experts] on the CPU, each expert's tokens.
        sites: the experts' handles, int64 [] each.
        layout: the experts' common saved_layout, or ''.
        keeps, training, when, number: as in ``linear``.
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
    """Returns [dx [T, K], dw [N, K] of each weight]; gradients that are not needed are empty.

    Args:
        dy: [T, N].
        kept: the saved input: flat codes and scales, or x [T, K]; empty without any dw.
        weights: [N, K] each.
        stamps, weight_scales: int64 [experts, 2] and float32 [experts] of ``stamps_of``.
        measured, counted: float32 [experts, 2, 2] and int64 [7], forward's deferred record, or empty.
        counts, sites, layout, number: as in ``grouped_linear``.
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
    """dgrad's operands [K, N] of the weights [N, K], expert by expert; stamps [experts, 2], weight_scales [experts]."""
    parts = zip(group.sites, weights, stamps, weight_scales, strict=True)
    return [columnwise_of(site.weights, weight, stamp, scale) for site, weight, stamp, scale in parts]


def _saved_tokens(
    group: Group, kept: list[Tensor], packed: SavedExpertsLayout | None, dtype: torch.dtype, *, as_one: bool
) -> Each | None:
    """wgrad's operands [K, T_e] of the tokens: None, high-precision tokens, or codes (``as_one``: as one batch)."""
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
    """For torch.utils.flop_counter: one weight per token."""
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
    """The FLOPs of one GEMM for dx and one for the dws, where needed."""
    return 2 * math.prod(dy_shape) * weight_shapes[0][1] * (needs_dgrad + any(needs_wgrad))

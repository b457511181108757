"""The guard under Megatron-Core: new plans for unhealthy sites, on all ranks.

It runs between iterations. state/guard.py finds the unhealthy sites. Here such a site gets a new plan, as an override
by name would give it, and a new site object in its linear. The old site's slots stay in their arena and are never
cast again: ranks identify slots by order.

Ranks that hold a site share its arena, so all of them find the same and move it at the same iteration without
communication. Other pipeline stages and expert ranks receive moves of sites that they do not hold: every rank knows
all moves, and the first one prints and saves them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..files.terminal import print_rank_0
from ..plan.overrides import matching
from ..quantizer import measure
from ..recipe import recipe_name
from ..state.arena import Slot
from ..state.collectives import union
from ..state.fp8_state import Fp8State
from ..state.guard import Move
from ..state.iteration import LATER, NEVER, NOW, recorded
from .runtime import state_of, unwrap
from .sites import fp8_linears, make_site


def move_unhealthy_sites(model_chunks: list[Any], state: Fp8State, *, partial: bool) -> list[Move]:
    """Moves the sites that the finished iteration found unhealthy; returns all moves of this iteration, on every rank.

    Collective if ``partial``: ranks hold different sites. A site that fp8_overrides names is never moved.
    """
    guard = state.guard
    if guard is None:
        return []
    moves = []
    sender_slots = _slots_of_senders(model_chunks)
    for linear in fp8_linears(model_chunks):
        site = linear.fp8_site
        slots = {q.slot.name: role for role, q in site.quantizers.items() if q is not None}
        slots |= sender_slots.get(site.plan.name, {})
        found = [finding for finding in state.findings if finding.slot in slots]
        overrides = getattr(unwrap(model_chunks[0]).config, "fp8_overrides", None) or {}
        if not found or not site.is_fp8 or matching(site.plan.name, overrides):
            continue
        to = guard.next_rung(recipe_name(site.plan.recipe), found[0].illness)
        why = "; ".join(f"{slots[finding.slot]} {finding}" for finding in found)
        moves.append(Move(site.plan.name, to, state.iteration, why))
    if partial:  # each move once, in the same order everywhere; without moves one number is exchanged
        moves = sorted(union(dict.fromkeys(moves)))
    if moves:
        apply_moves(model_chunks, state, moves)
        for move in moves:
            print_rank_0(
                f"megatron_fp8: guard: {move.site} runs in {move.to} from iteration {move.iteration + 1} on: {move.why}"
            )
    return moves


def _slots_of_senders(model_chunks: list[Any]) -> dict[str, dict[str, str]]:
    """Returns site -> slot -> role, for operands that are quantized before they are sent (moe_fp8_dispatch)."""
    found: dict[str, dict[str, str]] = {}
    for dispatch in _dispatches(model_chunks):
        for linear, slot, role in dispatch.slots():
            found.setdefault(linear.fp8_site.plan.name, {})[slot] = role
    return found


def _dispatches(model_chunks: list[Any]) -> list[Any]:
    """Returns the objects that quantize tokens before they are sent to experts (moe_fp8_dispatch), one per layer."""
    modules = (module for chunk in model_chunks for module in unwrap(chunk).modules())
    return [module.fp8_dispatch for module in modules if hasattr(module, "fp8_dispatch")]


def apply_moves(model_chunks: list[Any], state: Fp8State, moves: list[Move]) -> None:
    """Applies moves, new ones or a checkpoint's, to this rank's sites; the guard records all of them."""
    assert state.guard is not None
    for move in moves:
        state.guard.moved(move)
    named = {move.site for move in moves}
    for linear in fp8_linears(model_chunks):
        site = linear.fp8_site
        if site.plan.name in named:
            slots = [quantizer.slot for quantizer in site.quantizers.values() if quantizer is not None]
            for slot in slots:
                slot.name += " (left)"
            linear.bind_fp8_site(make_site(linear, site.plan.name, state))
            if slots and not linear.fp8_site.is_fp8:
                linear.register_forward_hook(partial(_count_nonfinite, slots[0]))
    for dispatch in _dispatches(model_chunks):
        dispatch.update_refusals()


def _count_nonfinite(slot: Slot, linear: Any, args: tuple[Any, ...], output: Any) -> None:
    """Counts NaN and Inf in the input and the output's gradient of a linear that left FP8.

    Its casts counted them before; without them the optimizer would step on such values. Not in compiled code.
    """
    x, y = args[0], output[0] if isinstance(output, tuple) else output
    when = recorded(linear.training, y)
    if when == NEVER or torch.compiler.is_compiling():
        return
    nonfinite = measure(x)[1]
    if when == NOW:
        slot.count(nonfinite)

    def count(dy: torch.Tensor) -> None:
        slot.count(measure(dy)[1] + (nonfinite if when == LATER else 0))

    if y.requires_grad:
        y.register_hook(count)


def guard_moves(model_chunks: list[Any]) -> list[Move]:
    """Returns the last move of each site that the guard has moved; equal on every rank."""
    guard = state_of(unwrap(model_chunks[0]).config).guard
    return [] if guard is None else list(guard.moves.values())

"""The guard under Megatron-Core: new plans for ill sites, between iterations, on all ranks.

state/guard.py finds them. Here a site is planned anew, as an override by name would have it, and takes the old one's
place in its linear. The old one's slots stay in their arena and are never cast again: ranks agree on slots by order.

Ranks that hold a site share its arena, so they find the same and move it at the same iteration without asking each
other. Stages of a pipeline, and ranks with other experts, are told of moves of sites that they do not hold: every rank
knows all moves, and the first one prints and saves them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..files.say import say
from ..plan.overrides import matching
from ..quantizer import measure
from ..recipe import recipe_name
from ..state.arena import Slot
from ..state.fp8_state import Fp8State
from ..state.guard import Move
from ..state.iteration import LATER, NEVER, NOW, recorded
from ..state.ranks import union
from .runtime import state_of, unwrap
from .sites import fp8_linears, make_site


def move_ill_sites(model_chunks: list[Any], state: Fp8State, *, partial: bool) -> list[Move]:
    """Move the sites that the finished iteration found ill; all moves of this iteration, on every rank. Collective
    where ``partial``: some ranks hold other sites than others.

    A site that fp8_overrides names stays as the user has it.
    """
    guard = state.guard
    if guard is None:
        return []
    moves = []
    sent = _slots_of_senders(model_chunks)
    for linear in fp8_linears(model_chunks):
        site = linear.fp8_site
        slots = {q.slot.name: role for role, q in site.quantizers.items() if q is not None}
        slots |= sent.get(site.plan.name, {})
        found = [finding for finding in state.ill if finding.slot in slots]
        overrides = getattr(unwrap(model_chunks[0]).config, "fp8_overrides", None) or {}
        if not found or not site.is_fp8 or matching(site.plan.name, overrides):
            continue
        to = guard.next_rung(recipe_name(site.plan.recipe), found[0].illness)
        why = "; ".join(f"{slots[finding.slot]} {finding}" for finding in found)
        moves.append(Move(site.plan.name, to, state.iteration, why))
    moves = _everybodys(moves) if partial else moves
    if moves:
        take(model_chunks, state, moves)
        for move in moves:
            say(
                f"megatron_fp8: guard: {move.site} runs in {move.to} from iteration {move.iteration + 1} on: {move.why}"
            )
    return moves


def _slots_of_senders(model_chunks: list[Any]) -> dict[str, dict[str, str]]:
    """Site -> slot -> role, of operands that are quantised before they are sent to the site (moe_fp8_dispatch)."""
    found: dict[str, dict[str, str]] = {}
    for dispatch in _dispatches(model_chunks):
        for linear, slot, role in dispatch.slots():
            found.setdefault(linear.fp8_site.plan.name, {})[slot] = role
    return found


def _dispatches(model_chunks: list[Any]) -> list[Any]:
    """What quantises tokens before they are sent to experts (moe_fp8_dispatch), of each layer that does."""
    modules = (module for chunk in model_chunks for module in unwrap(chunk).modules())
    return [module.fp8_dispatch for module in modules if hasattr(module, "fp8_dispatch")]


def take(model_chunks: list[Any], state: Fp8State, moves: list[Move]) -> None:
    """Make these moves, now or as a checkpoint has them, of the sites that this rank holds; remember them all."""
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
        dispatch.look_elsewhere()


def _count_nonfinite(slot: Slot, linear: Any, args: tuple[Any, ...], output: Any) -> None:
    """A linear that left FP8 casts nothing that would count its NaN and Inf, and the optimizer would step on them: its
    input and the gradient of its output are counted where its casts were. Not in traced code."""
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
    """The last move of each site that the guard has moved, on every rank the same."""
    guard = state_of(unwrap(model_chunks[0]).config).guard
    return [] if guard is None else list(guard.moves.values())


def _everybodys(moves: list[Move]) -> list[Move]:
    """The moves of all ranks, each once, in the same order everywhere. Where nobody moves anything that is one number."""
    return sorted(union(dict.fromkeys(moves)))

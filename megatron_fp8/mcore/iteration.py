"""Ends an FP8 iteration: one amax collective a group, one health status.

It runs after ``finalize_model_grads_func`` and before the optimizer step. The optimizer reads ``found_nonfinite`` of
the runtimes whose models it steps, and skips the step on all ranks together: saturating casts hide an Inf from the
gradients, so a loss scaler would not see it.

Last comes the guard: a site that state/guard.py finds unhealthy gets a new plan, as an override by name would give it,
and a new site object in its linear. The old site's slots stay in their arena and are never cast again: ranks identify
slots by order. Ranks that hold a site share its arena, so all of them find the same and move it at the same iteration
without communication. Other pipeline stages and expert ranks receive moves of sites that they do not hold: every rank
knows all moves, and the first one prints and saves them.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..files.terminal import print_rank_0
from ..fp8_utils import quantizes, switch_of, switch_shown
from ..linear.gemm_site import unmark_zeros
from ..params.fp8_parameter import Fp8Parameter
from ..plan.overrides import matching_overrides
from ..quantizer import measure
from ..recipe import recipe_name
from ..state.arena import Slot
from ..state.collectives import union
from ..state.cuda_graph import CapturedStep
from ..state.fp8_state import Fp8State
from ..state.guard import LEFT, Move
from ..state.iteration import LATER, NEVER, NOW, IterationCounts, record_time
from . import is_installed
from .report import plan_summary
from .runtime import find_runtime, living_runtimes, runtime_of, set_length, state_of, unwrap
from .sites import check_plan, fp8_linears, is_checked, make_site

_latest = IterationCounts()
"""Counts of this process's last iteration, for ``iteration_counts()`` only."""


def finish_iteration(model_chunks: list[Any]) -> IterationCounts:
    """Reduces and updates all FP8 state of these chunks' config. Collective over all ranks; call it once per iteration.

    Megatron-Core's schedules call it, after ``config.finalize_model_grads_func``. A custom training loop calls it
    with a list of its model (or chunks) after the last backward of an iteration, whatever the number of microbatches,
    and before ``optimizer.step()``; it skips the step if ``nonfinite`` of the result is not 0. Without this call, the
    forward after an optimizer step raises.

    Raises:
        RuntimeError: FP8 is on and install() was not called; or ranks of a group hold different FP8 tensors.
    """
    config = unwrap(model_chunks[0]).config
    if quantizes(config) and not is_installed():
        raise RuntimeError(
            f"{switch_shown(config)} was asked for, but Megatron-Core runs in BF16: call megatron_fp8.mcore.install()"
            " before building the model"
        )
    state = state_of(config)
    if state.capturing:
        return IterationCounts()  # CapturedIteration ends the iteration that it captures
    if quantizes(config) and not is_checked(model_chunks):
        check_plan(model_chunks)
        if not runtime_of(config).plan_shown:
            print_rank_0(plan_summary(model_chunks))
    state.finish_iteration()
    if quantizes(config):
        _announce_switch(state, switch_of(config).upper(), "FP16" if config.fp16 else "BF16")
    counts = _final_counts(config, state)
    if quantizes(config):
        move_unhealthy_sites(model_chunks, state, partial=_groups_are_partial(config))
    return counts


class CapturedIteration(CapturedStep):
    """Megatron-Core's CapturedStep (state/cuda_graph.py); ``replayed`` also updates the optimizer's health status.

    FP8 parameters keep the memory of their scales from here on: make it before the capture.
    """

    def __init__(self, model_chunks: list[Any]):
        self._config = unwrap(model_chunks[0]).config
        self._state = state_of(self._config)
        self._parameters = [param for chunk in model_chunks for param in chunk.parameters()]
        for param in self._parameters:
            if isinstance(param, Fp8Parameter):
                param.update_in_place()
        super().__init__(self._state)

    def replayed(self) -> IterationCounts:
        """As CapturedStep's. Collective over all ranks where a reduction group does not have all of them."""
        super().replayed()
        unmark_zeros(self._parameters)  # no backward hook ran
        return _final_counts(self._config, self._state)


def _final_counts(config: Any, state: Fp8State) -> IterationCounts:
    """Returns the state's last counts, with ``nonfinite`` of all ranks. Collective where groups are partial.

    A pipeline stage or an expert rank counts only its own tensors, so all ranks take the maximum.
    """
    global _latest
    _latest = state.last
    if quantizes(config) and _groups_are_partial(config):
        worst = torch.tensor(state.last.nonfinite, dtype=torch.int64, device=state.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        state.last.nonfinite = int(worst)
    return state.last


def set_training_length(config: Any, iterations: int, done: int | None = None) -> None:
    """Sets the length of the training: ``fp8_high_precision_warmup`` and ``_healing`` are fractions of it.

    Call it before the first iteration, on every rank. A longer run has longer phases.

    Args:
        iterations: of the whole run, including those before a resume.
        done: those before a resume. Megatron-Core's ``dist_checkpointing`` does not restore it; ``load_fp8_state_dict``
            does. None: unchanged.

    Raises:
        ValueError: not a positive integer, the fractions leave no iteration to FP8, or done is not 0 to iterations.
    """
    set_length(config, iterations, done)


def announce_phases_of_load() -> None:
    """Prints a line on the first rank if models with high-precision phases load before their first iteration."""
    states = [runtime.state for runtime in living_runtimes()]
    if any(not state.phases.trivial and state.iteration == 0 for state in states):
        print_rank_0(
            "megatron_fp8: fp8_high_precision_warmup and _healing count iterations from this load on; to resume a run,"
            " call megatron_fp8.mcore.iteration.set_training_length(config, iterations, done=N)"
        )


def _announce_switch(state: Fp8State, quantized: str, own: str) -> None:
    """Prints a line on the first rank if the next iteration has another precision than the one just finished."""
    before, now = state.phases.at(state.iteration - 1), state.known_phase()
    if before == now:
        return
    over = quantized if before == "fp8" else f"the {before} in {own}"
    what, end = quantized if now == "fp8" else own, f"{over} is over"
    if now == "healing" and state.phases.parts:
        what, end = f"{own} in {', '.join(state.phases.parts)}", f"{quantized} in the rest"
    print_rank_0(f"megatron_fp8: {what} from iteration {state.iteration + 1} on, {end}", to="stdout")


def _groups_are_partial(config: Any) -> bool:
    if not parallel_state.model_parallel_is_initialized() or dist.get_world_size() == 1:
        return False
    return (
        parallel_state.get_pipeline_model_parallel_world_size() > 1
        or parallel_state.get_expert_model_parallel_world_size() > 1
        or config.tp_only_amax_red
    )


def iteration_counts(config: Any = None) -> dict[str, int]:
    """Returns what an iteration did on this rank: fp8_gemms, hp_gemms, casts, amax_collectives, ...; nonfinite of all
    ranks.

    Args:
        config: the model's config; None: the iteration that this process finished last, of any model.
    """
    runtime = None if config is None else find_runtime(config)
    last = _latest if config is None else IterationCounts() if runtime is None else runtime.state.last
    return asdict(last)


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
        if site.heals and state.phase == "healing":
            continue
        slots = {q.slot.name: role for role, q in site.active_site.quantizers.items() if q is not None}
        slots |= sender_slots.get(site.plan.name, {})
        found = [finding for finding in state.findings if finding.slot in slots]
        overrides = getattr(unwrap(model_chunks[0]).config, "fp8_overrides", None) or {}
        if not found or not site.is_fp8 or matching_overrides(site.plan.name, overrides):
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
                slot.name += LEFT
            linear.bind_fp8_site(make_site(linear, site.plan.name, state))
            if slots and not linear.fp8_site.is_fp8:
                linear.register_forward_hook(partial(_count_nonfinite, slots[0], slots[-1]))
    for dispatch in _dispatches(model_chunks):
        dispatch.update_refusals()


def _count_nonfinite(
    of_input: Slot, of_gradient: Slot, linear: Any, args: tuple[Any, ...], output: Any
) -> None:
    """Counts NaN and Inf in the input and the output's gradient of a linear that left FP8.

    Its casts counted them before; without them the optimizer would step on such values. Not in compiled code.
    """
    x, y = args[0], output[0] if isinstance(output, tuple) else output
    when = record_time(linear.training, y)
    if when == NEVER or torch.compiler.is_compiling():
        return
    nonfinite = measure(x)[1]
    if when == NOW:
        of_input.count(nonfinite)

    def count(dy: torch.Tensor) -> None:
        of_gradient.count(measure(dy)[1])
        if when == LATER:
            of_input.count(nonfinite)

    if y.requires_grad:
        y.register_hook(count)


def guard_moves(model_chunks: list[Any]) -> list[Move]:
    """Returns the last move of each site that the guard has moved; equal on every rank."""
    guard = state_of(unwrap(model_chunks[0]).config).guard
    return [] if guard is None else list(guard.moves.values())

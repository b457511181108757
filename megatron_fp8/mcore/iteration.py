"""Ends an FP8 iteration: one amax collective a group, one health status.

It runs after ``finalize_model_grads_func`` and before the optimizer step. The optimizer reads ``found_nonfinite`` of
the runtimes whose models it steps, and skips the step on all ranks together: saturating casts hide an Inf from the
gradients, so a loss scaler would not see it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..files.terminal import print_rank_0
from ..fp8_utils import quantizes, switch_of, switch_shown
from ..state.cuda_graph import CapturedStep
from ..state.fp8_state import Fp8State
from ..state.iteration import IterationCounts
from . import is_installed
from .guard_plans import move_unhealthy_sites
from .runtime import find_runtime, set_length, state_of, unwrap
from .sites import check_plan, is_checked

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
    if quantizes(config) and state.iteration == 0 and not is_checked(model_chunks):
        check_plan(model_chunks)
    state.finish_iteration()
    if quantizes(config):
        _announce_switch(state, switch_of(config).upper(), "FP16" if config.fp16 else "BF16")
    counts = _final_counts(config, state)
    if quantizes(config):
        move_unhealthy_sites(model_chunks, state, partial=_groups_are_partial(config))
    return counts


class CapturedIteration(CapturedStep):
    """Megatron-Core's CapturedStep (state/cuda_graph.py); ``replayed`` also updates the optimizer's health status."""

    def __init__(self, model_chunks: list[Any]):
        self._config = unwrap(model_chunks[0]).config
        self._state = state_of(self._config)
        super().__init__(self._state)

    def replayed(self) -> IterationCounts:
        """As CapturedStep's. Collective over all ranks where a reduction group does not have all of them."""
        super().replayed()
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


def set_training_length(config: Any, iterations: int) -> None:
    """Sets the length of the training: ``fp8_high_precision_warmup`` and ``_healing`` are fractions of it.

    Call it before the first iteration, on every rank, with the iterations of the whole run, including those before a
    resume. A longer run has longer phases.

    Raises:
        ValueError: not a positive integer, or the fractions leave no iteration to FP8.
    """
    set_length(config, iterations)


def _announce_switch(state: Fp8State, quantized: str, own: str) -> None:
    """Prints a line on the first rank if the next iteration has another precision than the one just finished."""
    before, now = state.phases.at(state.iteration - 1), state.known_phase()
    if before == now:
        return
    precision = quantized if now == "fp8" else own
    over = quantized if before == "fp8" else f"the {before} in {own}"
    print_rank_0(
        f"megatron_fp8: {precision} from iteration {state.iteration + 1} on, {over} is over", to="stdout"
    )


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

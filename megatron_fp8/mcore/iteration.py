"""The end of an FP8 iteration under Megatron-Core: one amax collective per group, then one shared verdict on health.

It runs after ``finalize_model_grads_func`` and before the optimizer step, which asks ``found_nonfinite`` and skips on all
ranks together: saturating casts hide an Inf from the gradients, so a loss scaler downstream would see nothing.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from ..state.counts import IterationCounts
from ..state.fp8_state import Fp8State
from ..state.graph import CapturedStep
from . import is_installed
from .guard import move_ill_sites
from .sites import check_plan, state_of, unwrap

_last = IterationCounts()
_last_is_fp8 = False


def finish_iteration(model_chunks: list[Any]) -> IterationCounts:
    """Reduce and update all FP8 state of these chunks' config. Collective over all ranks; once per iteration.

    Megatron-Core's schedules call it, after ``config.finalize_model_grads_func``. A training loop of one's own calls it
    with a list of its model (or chunks) after the last backward of an iteration, whatever the number of microbatches,
    and before ``optimizer.step()``: ``nonfinite`` of what it returns says whether the step should be skipped. Without
    it, the forward after an optimizer step is an error.

    Raises:
        RuntimeError: FP8 was asked for and install() was not called; or ranks of a group hold different FP8 tensors.
    """
    global _last, _last_is_fp8
    config = unwrap(model_chunks[0]).config
    if config.fp8 and not is_installed():
        raise RuntimeError(
            f"fp8={config.fp8!r} was asked for, but Megatron-Core runs in BF16: call megatron_fp8.mcore.install() before"
            " building the model"
        )
    state = state_of(config)
    if config.fp8 and state.iteration == 0:
        check_plan(model_chunks)
    _last = state.finish_iteration()
    _last_is_fp8 = bool(config.fp8)
    if _last_is_fp8:
        _announce_switch(state, "FP16" if config.fp16 else "BF16")
    if _last_is_fp8:
        _share_verdict(config)
        move_ill_sites(model_chunks, state, partial=_groups_are_partial(config))
    return _last


class CapturedIteration(CapturedStep):
    """CapturedStep (graph.py) over a Megatron-Core model's FP8 state; ``replayed`` tells the optimizer about health."""

    def __init__(self, model_chunks: list[Any]):
        self._config = unwrap(model_chunks[0]).config
        super().__init__(state_of(self._config))

    def replayed(self) -> IterationCounts:
        """As CapturedStep's. Collective over all ranks where a reduction group is not all of them."""
        global _last, _last_is_fp8
        _last, _last_is_fp8 = super().replayed(), True
        _share_verdict(self._config)
        return _last


def _share_verdict(config: Any) -> None:
    """A pipeline stage, or an expert's ranks, saw only its own tensors: everybody takes the worst of all."""
    if _groups_are_partial(config):
        worst = torch.tensor(_last.nonfinite, dtype=torch.int64, device=state_of(config).device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        _last.nonfinite = int(worst)


def set_training_length(config: Any, iterations: int) -> None:
    """Say how long the training will be: ``fp8_high_precision_warmup`` and ``_healing`` are fractions of it.

    Call it before the first iteration, on every rank, with the iterations of the whole run, those before a resume
    included. A run that is made longer has longer phases.

    Raises:
        ValueError: not a positive integer, or the fractions leave no iteration to FP8.
    """
    state = state_of(config)
    state.phases = replace(state.phases, length=iterations)


def _announce_switch(state: Fp8State, own: str) -> None:
    """A line, on the first rank, where the next iteration's precision is another than that of the one just finished."""
    before, now = state.phases.at(state.iteration - 1), state.known_phase()
    if before == now or (dist.is_initialized() and dist.get_rank() != 0):
        return
    precision = "FP8" if now == "fp8" else own
    over = "FP8" if before == "fp8" else f"the {before} in {own}"
    print(f"megatron_fp8: {precision} from iteration {state.iteration + 1} on, {over} is over", flush=True)


def _groups_are_partial(config: Any) -> bool:
    if not parallel_state.model_parallel_is_initialized() or dist.get_world_size() == 1:
        return False
    return (
        parallel_state.get_pipeline_model_parallel_world_size() > 1
        or parallel_state.get_expert_model_parallel_world_size() > 1
        or config.tp_only_amax_red
    )


def found_nonfinite() -> bool:
    """Whether the last finished iteration quantised a NaN or an Inf, on any rank."""
    return _last_is_fp8 and _last.nonfinite > 0


def iteration_counts() -> dict[str, int]:
    """What the last finished iteration did on this rank: fp8_gemms, hp_gemms, casts, amax_collectives, ..."""
    return asdict(_last)

"""The gradient norm, for any order of shards, and the check for NaN.

**Shards.** Megatron-Core sums squares in float32, shard by shard, in the order of its buffers. Buffers are made by
dtype, so FP8 weights have a separate one, shards are split elsewhere, and the sum's last bits differ from the same
training with BF16 weights; clipping spreads the difference to every gradient. Summed in float64 and rounded once, the
norm is the same float32 number for any split (except for about one sum in 10^8, which is too close to a rounding
boundary). Only the distributed optimizer shards, and only FP8 moves weights to other buffers, so this norm is used
only for FP8 models with the distributed optimizer.

**One transfer.** Megatron-Core's step first decides whether to skip, which reads a value, then computes the norm and
reads that. On a single rank nothing is reduced in between, so here the norm is computed before the first value is
known, both are read in one transfer, and the step gets the stored norm. Both numbers come from the same operations in
the same order; a skipped step has computed an unused norm.

Rejected: the norm alone, since a NaN or an Inf makes it NaN or Inf. So do finite gradients whose squares overflow,
and their step must run. Several ranks keep two reads: they reduce the overflow status (loss_scaler.py) before any of
them needs the norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...state.collectives import own_device
from ..patches.patching import Patch


@torch.no_grad()
def norm_on_device(grads: list[torch.Tensor], group: Any) -> torch.Tensor:
    """Returns the 2-norm of all gradients of all ranks of ``group`` as one vector: float32 [1]. Collective.

    NaN or Inf in any gradient makes it NaN or Inf. A rank may have no gradients.
    """
    squares = torch.zeros(1, dtype=torch.float64, device=own_device())
    for grad in grads:
        squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt().to(torch.float32)


def norm_of_shards(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps get_grad_norm of an optimizer, or of chained ones in one group, if all of them shard FP8 models."""

    @functools.wraps(original)
    def get_grad_norm(self: Any) -> Any:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        parts = getattr(self, "chained_optimizers", [self])
        if not all(isinstance(part, DistributedOptimizer) and trains_fp8(part) for part in parts):
            return original(self)
        if len(parts) > 1 and not self.grads_states_parallel_group_is_shared():
            return original(self)
        grads = [grad for part in parts for grad in part.get_main_grads_for_grad_norm()]
        return float(norm_on_device(grads, parts[0].get_grad_stats_parallel_group()))

    return get_grad_norm


def trains_fp8(optimizer: Any) -> bool:
    """Whether the models of a distributed optimizer have FP8 layers."""
    return bool(optimizer.model_chunks[0].config.fp8)


@dataclass
class _Step:
    """A running step: its only optimizer, and the gradients' norm once read."""

    part: Any
    norm: float | None = None


_running: ContextVar[_Step | None] = ContextVar("running", default=None)
"""The running step; only within a step no other code can change gradients between the two reads."""


def in_one_step(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a chain's step."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        token = _running.set(_Step(self.chained_optimizers[0]) if _reads_together(self) else None)
        try:
            return original(self)
        finally:
            _running.reset(token)

    return step


def check_and_norm(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wraps _unscale_main_grads_and_check_for_nan: in such a step it also reads the norm."""

    @functools.wraps(original)
    def unscale_and_check(self: Any) -> bool:
        running = _running.get()
        if running is None or running.part is not self:
            return original(self)
        self.found_inf.fill_(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(
            self._collect_main_grad_data_for_unscaling(), self.found_inf, self.grad_scaler.inv_scale
        )
        has_overflow, norm = torch.cat([self.found_inf.double(), _norm(self)]).tolist()
        running.norm = norm if _in_float64(self) else norm**0.5
        return bool(has_overflow)

    return unscale_and_check


def norm_that_was_read(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a chain's get_grad_norm: returns the stored norm in such a step."""

    @functools.wraps(original)
    def get_grad_norm(self: Any) -> Any:
        running = _running.get()
        return original(self) if running is None or running.norm is None else running.norm

    return get_grad_norm


def _reads_together(chain: Any) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    parts = chain.chained_optimizers
    if dist.get_world_size() > 1 or len(parts) > 1:
        return False
    known = type(parts[0]) in (DistributedOptimizer, Float16OptimizerWithFloat16Params)
    return known and bool(parts[0].grad_scaler) and not parts[0].is_stub_optimizer


def _in_float64(part: Any) -> bool:
    """Whether the norm is this package's and not Megatron-Core's."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(part, DistributedOptimizer) and trains_fp8(part)


def _norm(part: Any) -> torch.Tensor:
    """Returns float64 [1] on the gradients' device: the norm, or its square if the host takes the root."""
    from megatron.core.optimizer import clip_grads

    grads = [clip_grads.to_local_if_dtensor(grad) for grad in part.get_main_grads_for_grad_norm()]
    if _in_float64(part):
        return norm_on_device(grads, part.get_grad_stats_parallel_group()).double()
    skipped = torch.zeros(1, dtype=torch.int, device=part.found_inf.device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, skipped, [grads], False)
    return (norm**2.0).double().view(1)


def patches() -> list[Patch]:
    """Returns the patches of the norm, of a step and of its two reads."""
    core = "megatron.core.optimizer"
    layout = "the norm of shards depends on the buffers' layout, and FP8 weights have a separate buffer"
    waits = "a step waits for the GPU twice, for the check for NaN and for the norm"
    chain = f"{core}.optimizer.ChainedOptimizer"
    return [
        Patch(
            f"{core}.distrib_optimizer.DistributedOptimizer",
            "get_grad_norm",
            norm_of_shards,
            layout,
            wrap=True,
        ),
        Patch(chain, "get_grad_norm", norm_of_shards, layout, wrap=True),
        Patch(chain, "step", in_one_step, waits, wrap=True),
        Patch(
            f"{core}.optimizer.MixedPrecisionOptimizer",
            "_unscale_main_grads_and_check_for_nan",
            check_and_norm,
            waits,
            wrap=True,
        ),
        Patch(chain, "get_grad_norm", norm_that_was_read, waits, wrap=True),
    ]

"""The gradient norm and its finiteness, in one read from the GPU.

Megatron-Core's step asks first whether to skip, reads the answer, then computes the norm and reads that. Where one rank
is alone nothing has to be agreed on in between, so here the norm is computed before the first answer is known, both are
read in one transfer, and the step is handed the norm when it asks for it. Both are the numbers that they were, from the
same operations in the same order; a step that is skipped has computed a norm for nothing.

Rejected: the norm alone, since a NaN or an Inf makes it NaN or Inf. So do finite gradients whose squares overflow, whose
step is taken. Several ranks keep two reads: they agree on the verdict (loss_scaler.py) before any of them needs the norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..patches.patching import Patch
from .grad_norm import norm_on_device, trains_fp8


@dataclass
class _Step:
    """One that runs: the only optimizer that it steps, and its gradients' norm once that was read."""

    part: Any
    norm: float | None = None


_running: ContextVar[_Step | None] = ContextVar("running", default=None)
"""Nobody can change gradients between the two reads inside a step; outside of one, anybody may."""


def in_one_step(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """step of a chain."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        token = _running.set(_Step(self.chained_optimizers[0]) if _reads_together(self) else None)
        try:
            return original(self)
        finally:
            _running.reset(token)

    return step


def check_and_norm(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """_unscale_main_grads_and_check_for_nan, which in such a step reads the norm along."""

    @functools.wraps(original)
    def unscale_and_check(self: Any) -> bool:
        running = _running.get()
        if running is None or running.part is not self:
            return original(self)
        self.found_inf.fill_(0.0)
        torch._amp_foreach_non_finite_check_and_unscale_(
            self._collect_main_grad_data_for_unscaling(), self.found_inf, self.grad_scaler.inv_scale
        )
        found, norm = torch.cat([self.found_inf.double(), _norm(self)]).tolist()
        running.norm = norm if _in_float64(self) else norm**0.5
        return bool(found)

    return unscale_and_check


def norm_that_was_read(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """get_grad_norm of a chain."""

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
    """Whether the norm is this package's (grad_norm.py) and not Megatron-Core's."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return isinstance(part, DistributedOptimizer) and trains_fp8(part)


def _norm(part: Any) -> torch.Tensor:
    """float64 [1] on the gradients' device: the norm, or its square where Megatron-Core takes the root on the host."""
    from megatron.core.optimizer import clip_grads

    grads = [clip_grads.to_local_if_dtensor(grad) for grad in part.get_main_grads_for_grad_norm()]
    if _in_float64(part):
        return norm_on_device(grads, part.get_grad_stats_parallel_group()).double()
    skipped = torch.zeros(1, dtype=torch.int, device=part.found_inf.device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, skipped, [grads], False)
    return (norm**2.0).double().view(1)


def patches() -> list[Patch]:
    """A step, and the two that it asks."""
    core = "megatron.core.optimizer.optimizer"
    why = "a step waits for the GPU twice, for the check for NaN and for the norm"
    return [
        Patch(f"{core}.ChainedOptimizer", "step", in_one_step, why, wrap=True),
        Patch(
            f"{core}.MixedPrecisionOptimizer",
            "_unscale_main_grads_and_check_for_nan",
            check_and_norm,
            why,
            wrap=True,
        ),
        Patch(f"{core}.ChainedOptimizer", "get_grad_norm", norm_that_was_read, why, wrap=True),
    ]

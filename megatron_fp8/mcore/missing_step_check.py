"""Detects training loops without ``finish_iteration``. Delayed scaling would use its first scales forever.

Megatron-Core's schedules call it after ``finalize_model_grads_func``. A custom loop calls ``finish_iteration`` after
the last backward. If an optimizer steps without it, the next forward in training mode raises.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .runtime import Fp8Runtime


def watch(runtime: Fp8Runtime) -> None:
    """Detects, by a hook on all optimizers, a step of these models without ``finish_iteration``. Once a runtime."""
    reference = weakref.ref(runtime)  # the hook is global and must not keep the models' state alive

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        runtime = reference()
        if runtime is None:
            return
        state = runtime.state
        due = state.counts.fp8_gemms and state.came_back and not state.capturing and not state.missing_end
        if due and runtime.is_stepped_by(optimizer):
            state.miss_end(_MISSING_END)

    hook = register_optimizer_step_post_hook(after_step)
    weakref.finalize(runtime, hook.remove).atexit = False


_MISSING_END = (
    "the optimizer stepped and the FP8 iteration was not ended: scales and histories would never be updated. Call"
    " megatron_fp8.mcore.iteration.finish_iteration([model]) once an iteration, after the last backward, or train"
    " by Megatron-Core's schedules, which do"
)

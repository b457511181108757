"""Detects a training loop without the end of FP8 iterations. Delayed scaling would keep its first scales for ever.

Megatron-Core's schedules end them (``finalize_model_grads_func``). A loop of one's own calls ``finish_iteration`` after
the last backward; if an optimizer steps and it was not called, the next forward in training mode is an error.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .runtime import Fp8Runtime


def watch(runtime: Fp8Runtime) -> None:
    """Look out for optimizers that step these models' parameters, or their masters. Once a runtime."""
    watched = weakref.ref(runtime)  # the hook is the process's, and must not keep the models' state

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        runtime = watched()
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

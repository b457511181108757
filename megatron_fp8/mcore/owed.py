"""Notices a training loop that never ends its FP8 iterations: delayed scaling would keep its first scales for ever.

Megatron-Core's schedules end them (``finalize_model_grads_func``). A loop of one's own calls ``finish_iteration`` after
the last backward; if an optimizer steps and it was not called, the next forward in training mode is an error.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..state.fp8_state import Fp8State

_models: weakref.WeakKeyDictionary[torch.nn.Module, Fp8State] = weakref.WeakKeyDictionary()
_hook: Any = None


def watch(model: torch.nn.Module, state: Fp8State) -> None:
    """Look out for optimizers that step this model's parameters, or their masters. One hook for the process."""
    global _hook
    _models[model] = state
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_optimizer_step)


def refuse_unsettled() -> NoReturn:
    """RuntimeError: an optimizer stepped after FP8 GEMMs of an iteration that was not ended (``Fp8State.owed``)."""
    raise RuntimeError(
        "the optimizer stepped and the FP8 iteration was not ended: scales and histories would never be updated. Call"
        " megatron_fp8.mcore.iteration.finish_iteration([model]) once an iteration, after the last backward, or train"
        " by Megatron-Core's schedules, which do"
    )


def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for model, state in list(_models.items()):
        if state.counts.fp8_gemms == 0 or state.capturing or state.owed:
            continue
        for param in model.parameters():
            if id(param) in stepped or id(getattr(param, "main_param", None)) in stepped:
                state.owed = True
                break

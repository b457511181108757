"""Per-config state of this package under Megatron-Core.

All parts of a model hold its config and share little else, so the state of a config's models is attached to it. A
plain Megatron ``TransformerConfig`` has no field for it and no hash, and copies that Megatron-Core makes of it during
model construction must find the same object. So it is stored in the config's ``__dict__``, under one key that only
this file reads and writes. It is created on first use during construction, not with the config: a user who copies a
config before building a model wants a separate model. The training's length is set earlier; it is a number under a
key of its own, which copies inherit.

Rejected: a table by ``id(config)``. It does not find copies, and ids are reused.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..fp8_utils import quantizes
from ..state.collectives import own_device
from ..state.fp8_state import FAST_ACCUMULATION, Fp8State
from ..state.guard import Guard, Thresholds
from ..state.precision_schedule import PrecisionSchedule

_KEY, _LENGTH, _DONE = "_fp8_runtime", "_fp8_training_length", "_fp8_iterations_done"


@dataclass(eq=False)
class Fp8Runtime:
    """State of the models of one config. Copies of the config share it; a copy of a model has its own. Unpickling, in
    another process, starts a new one.

    Attributes:
        state: amaxes, scales, counts; ``state.last.nonfinite`` is the health status.
        frozen: a model was built, and the FP8 settings can no longer change.
        te_layers: whether models have Transformer Engine's layers; None before the first query.
        te_recipe: TE's recipe object, once it was needed.
        prepared: models whose sites have names, plans and slots.
        plan_shown: whether the plan was printed.
        checked: models whose plans all ranks have checked together (``sites.check_plan``).
        fp8_params: models whose weights were made FP8 parameters, where the plan has FP8.
        optimizers: Megatron-Core's optimizers that step these models.
        moved_biases: experts' biases that were updated after the last batch, with their earlier values
            (patches/megatron_fixes.py).
    """

    state: Fp8State = field(default_factory=lambda: Fp8State(own_device(), keeps_weights=False))
    frozen: bool = False
    te_layers: bool | None = None
    te_recipe: Any = None
    plan_shown: bool = False
    prepared: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    checked: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    fp8_params: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    moved_biases: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _living.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Runtime:
        """Returns itself for a config's copy, a new runtime for a model's (model_copies.py): then ``memo`` has
        modules."""
        if not any(isinstance(value, torch.nn.Module) for value in memo.values()):
            return self
        copied = Fp8Runtime(frozen=self.frozen, te_layers=self.te_layers)
        copied.state.phases, copied.state.guard = self.state.phases, copy.deepcopy(self.state.guard, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Fp8Runtime, frozen=self.frozen), ()

    @property
    def found_nonfinite(self) -> bool:
        """Whether the last finished iteration quantized a NaN or an Inf on any rank."""
        return self.state.last.nonfinite > 0

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether a torch optimizer steps a parameter, or its master, of one of the prepared models."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return any(
            id(param) in stepped or id(getattr(param, "main_param", None)) in stepped
            for model in list(self.prepared)
            for param in model.parameters()
        )


_living: weakref.WeakSet[Fp8Runtime] = weakref.WeakSet()
"""All runtimes of this process. Megatron-Core's optimizers have no config, so ``optimizer/optimizer_setup.py`` searches
here."""


def find_runtime(config: Any) -> Fp8Runtime | None:
    """Returns the runtime of a config of Megatron-Core's or this package's; None if none was made yet."""
    found: Fp8Runtime | None = vars(config).get(_KEY)
    return found


def runtime_of(config: Any) -> Fp8Runtime:
    """Returns the runtime of a config, created on first use."""
    found = find_runtime(config)
    if found is None:
        found = vars(config)[_KEY] = Fp8Runtime()
        found.state.phases = PrecisionSchedule(length=vars(config).get(_LENGTH))
        found.state.iteration = vars(config).get(_DONE, 0)
    return found


def set_length(config: Any, iterations: int, done: int | None = None) -> None:
    """Sets the training's length, and how much of it is done, for this config's models and later copies.

    Args:
        iterations: of the whole training.
        done: iterations before a resume; None: unchanged.

    ValueError: done is not 0 to iterations; for others see Phases.
    """
    phases = _phases(config, iterations)
    if done is not None and (type(done) is not int or not 0 <= done <= iterations):
        raise ValueError(
            f"done={done!r} must be a whole number from 0 to iterations={iterations}: the iterations of the run before"
            " its resume"
        )
    vars(config)[_LENGTH] = iterations
    if done is not None:
        vars(config)[_DONE] = done
    runtime = find_runtime(config)
    if runtime is not None:
        runtime.state.phases = phases
        if done is not None:
            runtime.state.iteration = done


def _phases(config: Any, length: int | None) -> PrecisionSchedule:
    warmup, healing = (getattr(config, f"fp8_high_precision_{name}", 0.0) for name in ("warmup", "healing"))
    parts = getattr(config, "fp8_high_precision_healing_parts", None) or ()
    return PrecisionSchedule(warmup, healing, length, tuple(parts))


def _guard(config: Any) -> Guard | None:
    """Makes the guard that ``fp8_guard`` selects: True or 'bf16', or 'ladder'; None for False."""
    setting = getattr(config, "fp8_guard", False)
    if not setting or not quantizes(config):
        return None
    return Guard(Thresholds(config.fp8_guard_patience), setting if isinstance(setting, str) else "bf16")


def state_of(config: Any) -> Fp8State:
    """Returns the FP8 state of all models of this config, with its phases and guard as the config has them."""
    runtime = runtime_of(config)
    state = runtime.state
    if state.guard is None or not runtime.frozen:  # frozen without a guard: unpickled
        guard = _guard(config)
        if guard is None or state.guard is None or not state.guard.is_set_as(guard):
            state.guard = guard
    state.phases = _phases(config, state.phases.length)
    state.keeps_columnwise = getattr(config, "fp8_keep_columnwise", True)
    state.fast_gemms = FAST_ACCUMULATION[getattr(config, "fp8_fast_accumulation", "fprop")]
    return state


def living_runtimes() -> list[Fp8Runtime]:
    """Returns the runtimes of all configs in this process that are still referenced."""
    return list(_living)


def unwrap(chunk: Any) -> Any:
    """Returns the model inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def watch(runtime: Fp8Runtime) -> None:
    """Detects, by a hook on all optimizers, a step of these models without ``finish_iteration``. Once a runtime.

    Megatron-Core's schedules call it after ``finalize_model_grads_func``; a training loop of its own may forget it, and
    delayed scaling would use its first scales forever. After such a step the next forward in training mode raises.
    """
    reference = weakref.ref(runtime)  # the hook is global and must not keep the models' state alive

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        runtime = reference()
        if runtime is None:
            return
        state = runtime.state
        due = state.counts.fp8_gemms and state.had_backward and not state.capturing and not state.missing_end
        if due and runtime.is_stepped_by(optimizer):
            state.set_missing_end(_MISSING_END)

    hook = register_optimizer_step_post_hook(after_step)
    weakref.finalize(runtime, hook.remove).atexit = False


_MISSING_END = (
    "the optimizer stepped and the FP8 iteration was not ended: scales and histories would never be updated. Call"
    " megatron_fp8.mcore.iteration.finish_iteration([model]) once an iteration, after the last backward, or train"
    " by Megatron-Core's schedules, which do"
)

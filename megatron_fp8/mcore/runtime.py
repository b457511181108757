"""Per-config state of this package under Megatron-Core.

All parts of a model hold its config and have little else in common, so what belongs to its models hangs there. A plain
Megatron ``TransformerConfig`` has no field for it and no hash; and copies that Megatron-Core makes of it while it builds
must lead to the same object. So it lies in the config's own dictionary, under one key that this file alone reads and
writes. It is made on first use, in building, and not with the config: who copies a config before building anything from
it wants another model. What is said before that, the training's length, is a number under a key of its own, which copies
have too.

Rejected: a table by ``id(config)``, in which copies are not found and numbers are used again.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ..state.fp8_state import Fp8State
from ..state.guard import Guard, Thresholds
from ..state.phases import Phases
from ..state.ranks import own_device

_KEY, _LENGTH = "_fp8_runtime", "_fp8_training_length"


@dataclass(eq=False)
class Fp8Runtime:
    """Of the models of one config. Copies of the config share it; a copy of a model has its own, and in another process a
    copy begins anew.

    Attributes:
        state: amaxes, scales, counts; the verdict on health is its ``last.nonfinite``.
        frozen: a model was built, and the FP8 settings are closed to changes.
        te_layers: whether models are made of Transformer Engine's layers; None until that was asked.
        te_recipe: TE's recipe object, once it was needed.
        prepared: models the sites of which have their names, plans and slots.
        checked: those whose plans all ranks have looked at together (``sites.check_plan``).
        fp8_params: models the weights of which were made FP8 parameters, where the plan has FP8.
        optimizers: Megatron-Core's, that step these models.
        moved_biases: experts' biases that were moved after the last batch, with what they were (patches/router.py).
        sequence_ends: numbers of integer tensors that layers have read, with the tensor's version (layers/attention.py).
    """

    state: Fp8State = field(default_factory=lambda: Fp8State(own_device(), keeps_weights=False))
    frozen: bool = False
    te_layers: bool | None = None
    te_recipe: Any = None
    prepared: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    checked: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    fp8_params: weakref.WeakSet[torch.nn.Module] = field(default_factory=weakref.WeakSet)
    optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    moved_biases: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    sequence_ends: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def __post_init__(self) -> None:
        _living.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Runtime:
        """``memo`` has the modules that are being copied, if there are any: then it is a model's copy (copies.py)."""
        if not any(isinstance(made, torch.nn.Module) for made in memo.values()):
            return self
        copied = Fp8Runtime(frozen=self.frozen, te_layers=self.te_layers)
        copied.state.phases, copied.state.guard = self.state.phases, copy.deepcopy(self.state.guard, memo)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_another_process, (self.frozen,)

    @property
    def found_nonfinite(self) -> bool:
        """Whether the last finished iteration quantised a NaN or an Inf, on any rank."""
        return self.state.last.nonfinite > 0

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer of torch's steps a parameter, or its master, of one of the prepared models."""
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        return any(
            id(param) in stepped or id(getattr(param, "main_param", None)) in stepped
            for model in list(self.prepared)
            for param in model.parameters()
        )


_living: weakref.WeakSet[Fp8Runtime] = weakref.WeakSet()
"""Of this process. Megatron-Core's optimizers know no config, so they are looked for in all (``optimizer/models.py``)."""


def find_runtime(config: Any) -> Fp8Runtime | None:
    """The runtime of a config of Megatron-Core's or this package's; None if nothing has needed one yet."""
    found: Fp8Runtime | None = vars(config).get(_KEY)
    return found


def runtime_of(config: Any) -> Fp8Runtime:
    """The same, made on first use."""
    found = find_runtime(config)
    if found is None:
        found = vars(config)[_KEY] = Fp8Runtime()
        found.state.phases = Phases(length=vars(config).get(_LENGTH))
    return found


def set_length(config: Any, iterations: int) -> None:
    """Of the training, for the models of this config and of copies that are made of it. ValueError: see Phases."""
    phases = _phases(config, iterations)
    vars(config)[_LENGTH] = iterations
    runtime = find_runtime(config)
    if runtime is not None:
        runtime.state.phases = phases


def _phases(config: Any, length: int | None) -> Phases:
    warmup, healing = (getattr(config, f"fp8_high_precision_{name}", 0.0) for name in ("warmup", "healing"))
    return Phases(warmup, healing, length)


def _guard(config: Any) -> Guard | None:
    """What ``fp8_guard`` asks for: True or 'bf16', or 'ladder'; None where it is False."""
    wanted = getattr(config, "fp8_guard", False)
    if not getattr(config, "fp8", None) or not wanted:
        return None
    return Guard(Thresholds(config.fp8_guard_patience), wanted if isinstance(wanted, str) else "bf16")


def state_of(config: Any) -> Fp8State:
    """The FP8 state of all models built from this config. Its phases and its guard are the config's."""
    runtime = runtime_of(config)
    state = runtime.state
    if state.guard is None or not runtime.frozen:  # frozen without one: it comes from another process
        wanted = _guard(config)
        if wanted is None or state.guard is None or not state.guard.is_set_as(wanted):
            state.guard = wanted
    state.phases = _phases(config, state.phases.length)
    state.keeps_columnwise = getattr(config, "fp8_keep_columnwise", True)
    return state


def living_runtimes() -> list[Fp8Runtime]:
    """Those of all configs in this process that something still holds."""
    return list(_living)


def unwrap(chunk: Any) -> Any:
    """The model inside DistributedDataParallel and Float16Module."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _in_another_process(frozen: bool) -> Fp8Runtime:
    return Fp8Runtime(frozen=frozen)

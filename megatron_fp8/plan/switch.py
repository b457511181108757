"""What is ambient, and little is: which layer is being built, and whether the user switched FP8 off around a call.

While a model is built, ``building_layer`` tells the linears inside it their global layer number. At run time a context
can only switch sites off (``fp8_disabled``); it cannot switch on what the plan does not have. Leaving one does nothing.

Activation recompute is where an ambient goes wrong: it happens in the backward, when the context around the forward was
left, maybe in another thread. Megatron's recompute carries it along (``remember_fp8``). torch.utils.checkpoint knows
nothing of it; there a site answers as in its forwards (``ForwardReasons``). Rejected: patching torch.utils.checkpoint, of
which modules hold copies that were imported by name.

torch.compile cannot guard on a context variable, nor on thread-local state (whose value while tracing it takes for ever,
in silence). So every switch is also written to a plain object, ``_traced``, which traced code reads and guards on. It is
the process's: compiled code that several threads run at once must find FP8 switched alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ..recipe import Recipe


@dataclass(frozen=True)
class LayerBeingBuilt:
    """Global 0-based number of the layer under construction, and why it stays in BF16 (None: it does not)."""

    number: int
    bf16_reason: str | None


_building: ContextVar[LayerBeingBuilt | None] = ContextVar("building", default=None)
_disabled: ContextVar[str | None] = ContextVar("disabled", default=None)
_recipe: ContextVar[Recipe | None] = ContextVar("recipe", default=None)
_remembered: ContextVar[bool] = ContextVar("remembered", default=False)


class _Traced:
    """The innermost switch, for traced code."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.recipe: Recipe | None = None
        self.label = ""


_traced = _Traced()

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


@contextmanager
def building_layer(number: int, bf16_reason: str | None) -> Iterator[None]:
    """Linears made inside belong to this layer."""
    token = _building.set(LayerBeingBuilt(number, bf16_reason))
    try:
        yield
    finally:
        _building.reset(token)


def layer_being_built() -> LayerBeingBuilt | None:
    """The layer under construction here, None outside."""
    return _building.get()


@contextmanager
def fp8_disabled(reason: str | None) -> Iterator[None]:
    """Sites called inside run in high precision; None leaves things as they are around it."""
    with fp8_switched(disabled_reason() if reason is None else reason, recipe_override()):
        yield


def disabled_reason() -> str | None:
    """Why FP8 is switched off here, None if it is not."""
    return _traced.reason if torch.compiler.is_compiling() else _disabled.get()


@contextmanager
def fp8_switched(reason: str | None, recipe: Recipe | None) -> Iterator[None]:
    """Sites called inside run as said here, whatever is said around it.

    Args:
        reason: why they run in high precision; None switches on again those that an outer context switched off.
        recipe: what sites of a converted PyTorch model run in place of their own; None: their own.
    """
    outer = _traced.reason, _traced.recipe, _traced.label
    tokens = None if torch.compiler.is_compiling() else (_disabled.set(reason), _recipe.set(recipe))
    _traced.reason, _traced.recipe, _traced.label = reason, recipe, _label(recipe)
    try:
        yield
    finally:
        _traced.reason, _traced.recipe, _traced.label = outer
        if tokens is not None:
            _disabled.reset(tokens[0])
            _recipe.reset(tokens[1])


def recipe_override() -> Recipe | None:
    """The recipe that sites of a converted PyTorch model run here in place of their own, None if theirs."""
    return _traced.recipe if torch.compiler.is_compiling() else _recipe.get()


def recipe_label() -> str:
    """What tells recipe_override() from others, or an empty text: traced code guards on texts, but on objects by type."""
    return _traced.label if torch.compiler.is_compiling() else _label(_recipe.get())


def _label(recipe: Recipe | None) -> str:
    return "" if recipe is None else repr(recipe)


def remember_fp8(function: Callable[P, R]) -> Callable[P, R]:
    """The function, finding FP8 on or off as it is now, whenever and in whatever thread it is called.

    torch.utils.checkpoint.checkpoint(remember_fp8(module), x) recomputes as it computed.
    """
    reason, recipe = disabled_reason(), recipe_override()

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _remembered.set(True)
        try:
            with fp8_switched(reason, recipe):
                return function(*args, **kwargs)
        finally:
            _remembered.reset(token)

    return call


class Settled(Generic[A]):
    """What ``ambient`` said around the forwards of one site in this iteration, for recomputations to answer alike."""

    def __init__(self, ambient: Callable[[], A]) -> None:
        self._ambient = ambient
        self._iteration = -1
        self._met: set[A] = set()

    def settle(self, site: str, iteration: int, training: bool) -> A:
        """What it says of this call. Traced code remembers nothing: what it said is in the graph, recomputed or not.

        RuntimeError: a recomputation that nobody told, of one of several forwards that differed.
        """
        reason = self._ambient()
        if torch.compiler.is_compiling():
            return reason
        if not in_recompute():
            if training:
                if iteration != self._iteration:
                    self._iteration, self._met = iteration, set()
                self._met.add(reason)
            return reason
        if _remembered.get() or iteration != self._iteration:
            return reason
        if len(self._met) > 1:
            raise RuntimeError(
                f"{site} ran with FP8 switched off and on (or in several ways) in one iteration, and"
                " torch.utils.checkpoint does not say which call it recomputes: checkpoint"
                " megatron_fp8.plan.switch.remember_fp8(function) in place of the function"
            )
        return next(iter(self._met))


class ForwardReasons(Settled[str | None]):
    """Why FP8 was switched off around the forwards of one site in this iteration."""

    def __init__(self) -> None:
        super().__init__(disabled_reason)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """torch.autocast is off inside: it would round the products of the emulated GEMM."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def in_recompute() -> bool:
    """Whether this forward runs inside a backward pass: a recomputation, whose amax was recorded the first time.

    Not asked of traced code, which does not know when it will run: there operators ask.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1

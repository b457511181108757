"""Ambient state: the layer under construction, autocast contexts, dispatch modes.

During model construction ``building_layer`` gives the linears inside it their global layer number. At run time a
``AutocastState`` holds all that a context can set: FP8 is off, or another recipe runs. ``runs_fp8`` alone decides whether
a call of a site is in FP8, in eager mode, in compiled code, in a recomputation and in any thread. No autocast state
gives FP8 to a site whose plan has none, and leaving a context updates nothing.

Activation recompute would run under the wrong context: it happens in the backward, after the context around the
forward was left, perhaps in another thread. So a state set before a backward does not apply to forwards inside that
backward: there a layer uses the state of its forwards of this iteration (``Forwards``). A state set inside the
backward applies: Megatron's recompute sets it (``remember_fp8``), or a hook that runs its own forward. Rejected:
patching torch.utils.checkpoint, because other libraries recompute too.

torch.compile cannot guard on a context variable, nor on thread-local state (it silently uses the value at tracing
time forever). So every state is also written to a plain object, ``_traced``, which compiled code reads and guards
on. It is one per process: threads that run compiled code at the same time must have the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..recipe import Recipe
from ..state.fp8_state import Fp8State
from ..state.iteration import backward_task
from .site_plan import SitePlan

P = ParamSpec("P")
R = TypeVar("R")

# ---------------------------------------------------------------------------------------------------------- building


@dataclass(frozen=True)
class LayerBeingBuilt:
    """Global 0-based number of the layer under construction, and why it stays in BF16 (None: it does not)."""

    number: int
    bf16_reason: str | None


_building: ContextVar[LayerBeingBuilt | None] = ContextVar("building", default=None)


@contextmanager
def building_layer(number: int, bf16_reason: str | None) -> Iterator[None]:
    """Linears made inside belong to this layer."""
    token = _building.set(LayerBeingBuilt(number, bf16_reason))
    try:
        yield
    finally:
        _building.reset(token)


def layer_being_built() -> LayerBeingBuilt | None:
    """Returns the layer under construction, None outside."""
    return _building.get()


# ----------------------------------------------------------------------------------------------------------- running


class AutocastState(NamedTuple):
    """The FP8 settings of the contexts around a call. Immutable: a context replaces it.

    Attributes:
        off: the sites that run in high precision; 'unplanned': those whose plan has no layer number.
        reason: why, as text.
        recipe: replaces the recipe of a converted PyTorch model's sites; None: their own.
        label: identifies ``recipe``: compiled code guards on strings, but on objects only by type.
    """

    off: Literal["none", "unplanned", "all"] = "none"
    reason: str = ""
    recipe: Recipe | None = None
    label: str = ""

    def turns_off(self, plan: SitePlan) -> bool:
        """Whether sites of this plan run in high precision here.

        A plan with a layer number already says whether its layer is a first or last one that stays in BF16.
        """
        return self.off == "all" or (self.off == "unplanned" and plan.layer is None)

    def with_recipe(self, recipe: Recipe | None) -> AutocastState:
        """Returns a copy with another recipe."""
        return self._replace(recipe=recipe, label="" if recipe is None else repr(recipe))


class Site(Protocol):
    """The attributes of a GEMM site that ``runs_fp8`` reads."""

    plan: SitePlan
    state: Fp8State
    heals: bool


def runs_fp8(site: Site, autocast: AutocastState) -> bool:
    """Whether a call in this autocast state runs in FP8: by plan, in a phase that has FP8, and not switched off."""
    if site.plan.precision != "fp8" or autocast.turns_off(site.plan):
        return False
    phase = site.state.phase or site.state.known_phase()
    return phase == "fp8" or (phase == "healing" and not site.heals)


_DEFAULT = AutocastState()
_here: ContextVar[AutocastState] = ContextVar("autocast_state", default=_DEFAULT)
_entered_in: ContextVar[int] = ContextVar("entered_in", default=-1)
"""The backward inside which the state was set; -1: outside any."""


class _Traced:
    """The innermost context's state, for compiled code."""

    def __init__(self) -> None:
        self.autocast = _DEFAULT


_traced = _Traced()


def current_autocast_state() -> AutocastState:
    """Returns the current state."""
    return _traced.autocast if torch.compiler.is_compiling() else _here.get()


@contextmanager
def autocast_context(autocast: AutocastState) -> Iterator[None]:
    """Inside, this state applies, whatever contexts are around it."""
    outer = current_autocast_state()  # not _traced's: another thread may have set that
    tokens = None
    if not torch.compiler.is_compiling():
        tokens = _here.set(autocast), _entered_in.set(backward_task())
    _traced.autocast = autocast
    try:
        yield
    finally:
        _traced.autocast = outer
        if tokens is not None:
            _here.reset(tokens[0])
            _entered_in.reset(tokens[1])


@contextmanager
def fp8_disabled(reason: str | None, *, unplanned: bool = False) -> Iterator[None]:
    """Sites called inside run in high precision; None changes nothing.

    ``unplanned``: except those whose plan has a layer number and has already decided.
    """
    state = current_autocast_state()
    if reason is not None and not (unplanned and state.off == "all"):
        state = state._replace(off="unplanned" if unplanned else "all", reason=reason)
    with autocast_context(state):
        yield


# -------------------------------------------------------------------------------------------------------- recomputing


def remember_fp8(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the function with the current autocast state: each call, in any thread, runs in it.

    So torch.utils.checkpoint.checkpoint(remember_fp8(module), x) recomputes in the precision of the forward.
    """
    autocast = current_autocast_state()

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with autocast_context(autocast):
            return function(*args, **kwargs)

    return call


class Forwards:
    """Records the autocast states of one layer's forwards in an iteration, for their recomputations.

    Args:
        by_recipe: whether the layer runs a context's recipe: then forwards with other recipes differ.
    """

    def __init__(self, *, by_recipe: bool = False) -> None:
        self._by_recipe = by_recipe
        self._iteration = -1
        self._met: dict[
            tuple[bool, bool, str], AutocastState
        ] = {}  # (training, off for this site, recipe) -> state

    def state_for_call(self, site: Site, training: bool) -> AutocastState:
        """Returns the state of this call. While torch.compile traces it records nothing: the graph is fixed.

        RuntimeError: this call recomputes a forward, several forwards had different states, and no ``remember_fp8``
        tells which of them it repeats.
        """
        if torch.compiler.is_compiling():
            return current_autocast_state()
        here, iteration = _here.get(), site.state.iteration
        task = backward_task()
        if task == -1 or _entered_in.get() == task:
            if iteration != self._iteration:
                self._iteration, self._met = iteration, {}
            self._met[training, here.turns_off(site.plan), here.label if self._by_recipe else ""] = here
            return here
        if not self._met:
            return here
        # A recomputation in training ignores forwards in evaluation; one in evaluation uses all.
        met = [key for key in self._met if key[0] or not training] or self._met
        states = {key[1:]: self._met[key] for key in met}
        if len(states) > 1:
            raise RuntimeError(
                f"{site.plan.name} ran with FP8 switched off and on (or in several ways) in one iteration, and"
                " torch.utils.checkpoint does not say which call it recomputes: checkpoint"
                " megatron_fp8.plan.autocast_state.remember_fp8(function) in place of the function"
            )
        return next(iter(states.values()))


# ------------------------------------------------------------------------------------------------------ dispatch modes

# Selective activation checkpointing stores results of operations, tracers record operations, fake and meta tensors have
# no memory. They must not see the operations inside a linear: it changes results in place, and a recomputation runs
# different operations. So they see a single operator (linear/compiled.py).


def is_watched(*tensors: torch.Tensor) -> bool:
    """Whether a dispatch mode intercepts each operation, or a tensor has no data."""
    if _get_current_dispatch_mode() is not None:
        return True
    for x in tensors:  # noqa: SIM110 called by each linear, and a generator is slower
        if x.is_meta or isinstance(x, FakeTensor):
            return True
    return False


class WatchedForwards:
    """Records which forwards of a site's iteration a dispatch mode watched, so that a recomputation runs the same way.

    A recomputation must save the same tensors as its forward, but the mode around the forward may be off by then.
    """

    def __init__(self, state: Fp8State):
        self._state = state
        self._iteration = -1
        self._met: set[bool] = set()  # results for the forwards of that iteration

    def as_operator(self, *tensors: torch.Tensor) -> bool:
        """Whether an eager call on these tensors runs as one operator."""
        if self._state.capturing:
            return False  # the mode is the capture's own, which needs all operations
        watched, iteration = is_watched(*tensors), self._state.iteration
        if backward_task() == -1:
            if iteration != self._iteration:
                self._iteration, self._met = iteration, set()
            self._met.add(watched)
        elif iteration == self._iteration and len(self._met) == 1:
            return next(iter(self._met))
        return watched


# ----------------------------------------------------------------------------------------------------------- autocast


def autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is on for a device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Disables torch.autocast inside: it would round the products of the emulated GEMM."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

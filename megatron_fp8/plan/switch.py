"""Ambient state: the layer under construction, autocast contexts, observers.

While a model is built, ``building_layer`` tells the linears inside it their global layer number. At run time a ``Switch``
is all that a context can say: FP8 is off, or another recipe runs. ``runs_fp8`` is the one answer to whether a call of a
site is in FP8, in eager mode, in traced code, in a recomputation and in any thread. No switch gives FP8 to a site whose
plan has none, and leaving a context does nothing.

Activation recompute is where an ambient goes wrong: it happens in the backward, when the context around the forward was
left, maybe in another thread. So what was said before a backward began does not hold for forwards inside it: there a
layer answers as in its forwards of this iteration (``Forwards``). What is said inside the backward holds, by Megatron's
recompute, which carries it along (``remember_fp8``), or by a hook that runs a forward of its own. Rejected: patching
torch.utils.checkpoint. Others recompute too.

torch.compile cannot guard on a context variable, nor on thread-local state (whose value while tracing it takes for ever,
in silence). So every switch is also written to a plain object, ``_traced``, which traced code reads and guards on. It is
the process's: compiled code that several threads run at once must find FP8 switched alike.
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
from ..state.iteration import backward_task, in_backward
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
    """The layer under construction here, None outside."""
    return _building.get()


# ----------------------------------------------------------------------------------------------------------- running


class Switch(NamedTuple):
    """What is said of FP8 around a call. Immutable: a context replaces the whole of it.

    Attributes:
        off: the sites that run in high precision: those that are 'unplanned' are those whose plan knows no layer number.
        reason: why, for people to read.
        recipe: what sites of a converted PyTorch model run in place of their own; None: their own.
        label: tells ``recipe`` from others: traced code guards on texts, but on objects by their type.
    """

    off: Literal["none", "unplanned", "all"] = "none"
    reason: str = ""
    recipe: Recipe | None = None
    label: str = ""

    def turns_off(self, plan: SitePlan) -> bool:
        """Whether sites of this plan run in high precision here. A plan that knows its layer has decided by itself
        whether that is one of the first and last, which stay in BF16."""
        return self.off == "all" or (self.off == "unplanned" and plan.layer is None)

    def with_recipe(self, recipe: Recipe | None) -> Switch:
        """Another recipe in place of this one's."""
        return self._replace(recipe=recipe, label="" if recipe is None else repr(recipe))


class Site(Protocol):
    """What ``runs_fp8`` asks of a GEMM site."""

    plan: SitePlan
    state: Fp8State


def runs_fp8(site: Site, switch: Switch) -> bool:
    """Whether a call under this switch runs in FP8: planned so, in a phase that has FP8, and not switched off."""
    if site.plan.precision != "fp8" or switch.turns_off(site.plan):
        return False
    return (site.state.phase or site.state.known_phase()) == "fp8"


_NOTHING = Switch()
_here: ContextVar[Switch] = ContextVar("switch", default=_NOTHING)
_said_in: ContextVar[int] = ContextVar(
    "said_in", default=-1
)  # the backward inside which it was said; -1: outside any


class _Traced:
    """The innermost switch, for traced code."""

    def __init__(self) -> None:
        self.switch = _NOTHING


_traced = _Traced()


def current_switch() -> Switch:
    """The switch that holds here."""
    return _traced.switch if torch.compiler.is_compiling() else _here.get()


@contextmanager
def switched(switch: Switch) -> Iterator[None]:
    """Inside, this switch holds, whatever is said around it."""
    outer = current_switch()  # not what _traced has: that may be another thread's, which will have left it
    tokens = None
    if not torch.compiler.is_compiling():
        tokens = _here.set(switch), _said_in.set(backward_task())
    _traced.switch = switch
    try:
        yield
    finally:
        _traced.switch = outer
        if tokens is not None:
            _here.reset(tokens[0])
            _said_in.reset(tokens[1])


@contextmanager
def fp8_disabled(reason: str | None) -> Iterator[None]:
    """Sites called inside run in high precision; None leaves things as they are around it."""
    here = current_switch()
    with switched(here if reason is None else here._replace(off="all", reason=reason)):
        yield


@contextmanager
def unplanned_disabled(reason: str) -> Iterator[None]:
    """Sites called inside run in high precision, but not those whose plan knows their layer number: it has decided."""
    here = current_switch()
    with switched(here if here.off == "all" else here._replace(off="unplanned", reason=reason)):
        yield


# -------------------------------------------------------------------------------------------------------- recomputing


def remember_fp8(function: Callable[P, R]) -> Callable[P, R]:
    """The function; whenever it is called, in whatever thread, FP8 is switched on or off inside as it is now.

    So torch.utils.checkpoint.checkpoint(remember_fp8(module), x) recomputes in the precision of the forward.
    """
    switch = current_switch()

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with switched(switch):
            return function(*args, **kwargs)

    return call


class Forwards:
    """Remembers the switches around one layer's forwards of an iteration, for the recomputations of those.

    Args:
        by_recipe: whether the layer runs the recipe that a switch names: then forwards with other recipes differ.
    """

    def __init__(self, *, by_recipe: bool = False) -> None:
        self._by_recipe = by_recipe
        self._iteration = -1
        self._met: dict[
            tuple[bool, bool, str], Switch
        ] = {}  # (training, off for this site, recipe) -> what said so

    def switch(self, site: Site, training: bool) -> Switch:
        """The switch of this call, in this mode. While torch.compile traces none is remembered: the graph holds what was
        chosen.

        RuntimeError: this recomputes one of several forwards that differed, and nobody said which (``remember_fp8``).
        """
        if torch.compiler.is_compiling():
            return current_switch()
        here, iteration = _here.get(), site.state.iteration
        task = backward_task()
        if task == -1 or _said_in.get() == task:
            if iteration != self._iteration:
                self._iteration, self._met = iteration, {}
            self._met[training, here.turns_off(site.plan), here.label if self._by_recipe else ""] = here
            return here
        if not self._met:
            return here
        # Training's recomputations do not look at evaluations; a layer in evaluation may have been in training before.
        met = {key[1:]: switch for key, switch in self._met.items() if key[0] or not training}
        met = met or {key[1:]: switch for key, switch in self._met.items()}
        if len(met) > 1:
            raise RuntimeError(
                f"{site.plan.name} ran with FP8 switched off and on (or in several ways) in one iteration, and"
                " torch.utils.checkpoint does not say which call it recomputes: checkpoint"
                " megatron_fp8.plan.switch.remember_fp8(function) in place of the function"
            )
        return next(iter(met.values()))


# ------------------------------------------------------------------------------------------------------------ watched

# Selective activation checkpointing keeps results of operations to hand them out again, tracers write operations down,
# fake and meta tensors have no memory. The steps inside a linear are no business of theirs: it changes results in place,
# and a recomputation takes other steps. So they are given a single operator (linear/compiled.py).


def is_watched(*tensors: torch.Tensor) -> bool:
    """Whether a dispatch mode looks at each operation, or there is nothing to compute with."""
    if _get_current_dispatch_mode() is not None:
        return True
    for x in tensors:  # noqa: SIM110 each linear asks this, and a generator takes longer
        if x.is_meta or isinstance(x, FakeTensor):
            return True
    return False


class WatchedForwards:
    """Which forwards of a site's iteration were watched, so that a recomputation goes as they did.

    What a recomputation saves has to match what its forward saved, and the mode that was on around the forward may be off
    when it is recomputed.
    """

    def __init__(self, state: Fp8State):
        self._state = state
        self._iteration = -1
        self._met: set[bool] = set()  # answers given to the forwards of that iteration

    def as_operator(self, *tensors: torch.Tensor) -> bool:
        """Whether a call on these tensors, which nobody traces, goes as one operator."""
        if self._state.capturing:
            return False  # the mode is the capture's own, which wants all steps
        watched, iteration = is_watched(*tensors), self._state.iteration
        if not in_backward():
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
    """torch.autocast is off inside: it would round the products of the emulated GEMM."""
    if not autocasts(device):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)

"""Fp8Group: the FP8 linears of one model, and everything that FP8 keeps for them.

A group has one Fp8Config and, for every device its weights are on, one Fp8State: one arena, so one collective an
iteration, however many linears. It owns the GEMM sites of its linears (sites.py). Those are made when the first of its
linears runs, all together and in module order: then the weights are where they will be (a model may be converted on the
meta device and moved later), and ranks whose data takes different branches still hold the same slots.

``convert_to_fp8`` makes the group of a model. A linear made by itself is a group of its own, until ``fp8_step(model)``
finds it in a model and unites the model's.

A copy of a model is another group: the same config, and state of its own, into which a deep copy takes the histories as
they were then. What was pickled starts cold (fp8_state_dict keeps histories).
"""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..plan.overrides import check_overrides_match
from ..state.counts import IterationCounts
from ..state.fp8_state import Fp8State
from ..state.iteration import trains
from ..state.phases import Phases
from .config import Fp8Config
from .observed import Unused
from .replaced import LeftByTraining
from .sites import LONE, LinearSites, Preparation

if TYPE_CHECKING:
    from .linear import Fp8Layer


UNTRAINABLE = (
    "weights were made FP8 codes by prepare_for_inference, and no gradient trains those: load the weights into a model of"
    " high precision and convert that, or prepare a deep copy (copy.deepcopy) and train the original"
)
"""What is to be said of training a prepared model."""

MISSING_STEP = (
    "the optimizer stepped and fp8_step was not called: scales and histories would never be updated. Call"
    " megatron_fp8.nn.fp8_step(model) once an iteration, after the last backward, or"
    " register_fp8_step(optimizer, model) once, and again for copies: those of optimizers have no hooks"
)
"""The error of the next forward in training."""


class Fp8Group:
    """The FP8 linears of one model.

    Args:
        config: how they run.
        root: the model that is converted; None for a lone linear.

    Attributes:
        states: device -> FP8 state.
        iteration: how many iterations ``fp8_step`` has finished.
        unused: finds linears that do not run.
        left: its weights as the training left them.
        delays: some linear's scales are delayed.
        making: held while a site is made.
    """

    def __init__(self, config: Fp8Config, root: torch.nn.Module | None = None):
        self.config = replace(config)  # with overrides of its own: sites are planned when they first run
        self.states: dict[torch.device, Fp8State] = {}
        self.iteration = 0
        self.unused = Unused()
        self.left = LeftByTraining()
        self.delays = False
        self._said_untrainable = False
        self._resumed = False
        self._unwritten: list[torch.nn.Parameter] = []  # while an optimizer steps
        # Number of backwards at the last resume, and at each optimizer's last step.
        self._resumed_at = 0
        self._stepped_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.making = threading.Lock()
        self._phases = Phases()
        self._members: list[LinearSites] = []
        self._root = None if root is None else weakref.ref(root)
        _watch.add(self)

    @staticmethod
    def lone(config: Fp8Config) -> Fp8Group:
        """That of one linear which belongs to no model yet, named LONE. ValueError: an override means another name."""
        check_overrides_match(config.overrides, [LONE], "overrides")
        return Fp8Group(config)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy takes the config; its linears join it as they are copied."""
        return Fp8Group, (self.config,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Group:
        """The same, in the same iteration and phase: DelayedScaling.interval and random bits go by it."""
        copied = memo[id(self)] = Fp8Group(copy.deepcopy(self.config, memo))
        copied.iteration, copied._phases = self.iteration, self._phases
        copied.delays = self.delays
        for device, state in self.states.items():
            copied.state(device).continue_from(state)
        return copied

    # -------------------------------------------------------------------------------------------------------- members

    def join(
        self,
        linear: Fp8Layer,
        name: str,
        shape: tuple[int, int],
        prepared: Preparation | None = None,
        also: tuple[str, ...] = (),
    ) -> LinearSites:
        """Take in a linear of shape (out features, in features): its sites, of which none is made yet."""
        self._members.append(LinearSites(self, linear, name, shape, prepared, also))
        return self._members[-1]

    def leave(self, sites: LinearSites) -> None:
        """Let go of a linear, given by its sites."""
        self._members = [s for s in self._members if s is not sites]

    def forget(self, names: list[str]) -> None:
        """Let go of what is no more, and of linears under these names."""
        gone = set(names)
        self._members = [s for s in self._members if s.linear is not None and s.name not in gone]

    @property
    def members(self) -> list[tuple[LinearSites, Fp8Layer]]:
        """The linears that are alive, in module order, behind their sites."""
        return [(sites, linear) for sites in self._members if (linear := sites.linear) is not None]

    @property
    def linears(self) -> list[Fp8Layer]:
        """The linears that are alive, in module order."""
        return [linear for _, linear in self.members]

    @property
    def names(self) -> list[str]:
        """Names that linears joined under, in the model that was converted; also of those that are no more."""
        return [sites.name for sites in self._members]

    @property
    def root(self) -> torch.nn.Module | None:
        """The model that was converted, if it is alive."""
        return None if self._root is None else self._root()

    @property
    def is_lone(self) -> bool:
        """Whether it is that of one linear which no conversion has put into a model's, and is at its start."""
        return self._root is None and len(self._members) == 1 and self.iteration == 0

    def trains(self, parameters: set[int]) -> bool:
        """Whether an optimizer of parameters with these ids trains the model."""
        return any(id(parameter) in parameters for parameter in self._parameters())

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        if self.root is not None:
            yield from self.root.parameters()
        for linear in self.linears:
            yield from linear.trained()

    # --------------------------------------------------------------------------------------------------- state and sites

    def state(self, device: torch.device) -> Fp8State:
        """The state on a device, made on first use."""
        if device not in self.states:
            self.states[device] = Fp8State(
                device,
                iteration=self.iteration,
                phases=self._phases,
                keeps_columnwise=self.config.keep_columnwise,
                keeps_weights=False,  # loops, adapters and moving averages write through .data, and tell nobody
            )
        return self.states[device]

    def make_sites(self, device: torch.device) -> None:
        """Make the sites of every linear whose weight is on this device."""
        for sites, linear in self.members:
            if linear.fp8_device == device:
                sites.on(device)

    def make_all_sites(self) -> None:
        """Make the sites of every linear whose weight is somewhere."""
        # In module order, not a set's: ranks with GPUs of other numbers must reduce their states in the same order.
        for device in dict.fromkeys(linear.fp8_device for linear in self.linears):
            if device.type != "meta":
                self.make_sites(device)

    def leave_device(self, device: torch.device) -> None:
        """Drop the state on a device when no weight is left there: its collectives may not even be possible any more."""
        # From the last one on: modules are moved one by one, and while they are the last is still there.
        members = ((sites, sites.linear) for sites in reversed(self._members))
        if device in self.states and all(
            linear is None or linear.fp8_device != device for _, linear in members
        ):
            del self.states[device]
            for sites in self._members:
                sites.forget(device)

    def run_in(self, phases: Phases) -> None:
        """FP8 runs in these phases of the training, on every device, also where nothing has run yet."""
        self._phases = phases
        for state in self.states.values():
            state.phases = phases

    # -------------------------------------------------------------------------------------------------------- iterations

    def finish_iteration(self, ranks: Any, ran: bool = True) -> IterationCounts:
        """Update scales and histories, over these ranks (a process group; None: this process alone).

        ``ran`` False: nothing ran on this rank. Where that is so on all of them, nothing is ended.
        """
        self.make_all_sites()
        total, ended = IterationCounts(), ran
        for state in self.states.values():
            state.reduce_over(ranks)
            before = state.iteration
            total.add(state.finish_iteration(ran))
            ended = ended or state.iteration != before
        if ended:
            self.iteration += 1
            self._written_by_training()
        return total

    @property
    def ran(self) -> bool:
        """Whether anything of this iteration ran on this rank."""
        return any(state.ran for state in self.states.values())

    @property
    def awaits(self) -> bool:
        """Whether a backward may come through a forward of this iteration."""
        return any(state.activity.awaits for state in self.states.values())

    @property
    def came_back(self) -> bool:
        """Whether a backward reached one of its linears in this iteration, on this rank."""
        return any(state.came_back for state in self.states.values())

    @property
    def _backwards(self) -> int:
        return sum(state.activity.backwards for state in self.states.values())

    def _written_by_training(self) -> None:
        """What the parameters are now, the training made them."""
        self._resumed = False
        if self.delays or self.left.resumed:
            self.left.note(weight for linear in self.linears for weight in linear.sources)

    def resume(self, iteration: int) -> None:
        """Go on from a saved iteration; the weights may be other ones, or become those that were saved."""
        self.iteration = iteration
        self.left, self._resumed, self._resumed_at = LeftByTraining(), True, self._backwards
        for state in self.states.values():
            state.discard_iteration()
            state.iteration = iteration
            state.weight_generation += 1

    def before_optimizer_step(self) -> None:
        """Remember which weights hold what training left in them."""
        if self.delays:
            self._unwritten = self.left.unwritten(w for linear in self.linears for w in linear.sources)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Drop cached codes. After a training step, require the end of the iteration before the next forward."""
        for state in self.states.values():
            state.weight_generation += 1  # kept codes are stale, even where no version of a weight says so
        unwritten, self._unwritten = self._unwritten, []
        before = max(self._resumed_at, self._stepped_at.get(optimizer, 0))
        self._stepped_at[optimizer] = self._backwards
        if not trains(optimizer, self._backwards != before):
            self.left.note_again(unwritten)  # such a step writes weights, and changes none
            return
        self._written_by_training()
        for state in self.states.values():
            if state.counts.fp8_gemms and (state.activity.awaits or state.came_back):
                state.miss_end(MISSING_STEP)

    def loads(self, sites: LinearSites) -> None:
        """A linear's weight is about to be loaded. If its histories are not those that ``resume`` came with, it starts
        cold, as any weight without a scale does."""
        if not self._resumed:
            sites.start_again()
            for state in self.states.values():
                state.weight_generation += 1

    def say_untrainable(self) -> None:
        """Warn, once, that a prepared model is about to be trained."""
        if not self._said_untrainable:
            self._said_untrainable = True
            warnings.warn(
                f"train() of a model whose {UNTRAINABLE}; what is around them, such as adapters, may be trained",
                stacklevel=3,
            )

    def take_in(self, other: Fp8Group, device: torch.device) -> None:
        """Add another group's counts and activity to this one's, on the device where its linear is now."""
        for state in other.states.values():
            own = self.state(device)
            own.counts.add(state.counts)
            own.missing_end = own.missing_end or state.missing_end
            own.activity.backwards += state.activity.backwards - state.activity.ended
            own.activity.traced |= state.activity.traced
            own.activity.awaits |= state.activity.awaits


class _OptimizerWatch:
    """Tells groups that an optimizer of their models stepped.

    One for the process, since torch's hook for every optimizer is: a hook for each group would look through an
    optimizer's parameters once a group, and linears made one by one are a group each.
    """

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[Fp8Group] = weakref.WeakSet()
        self._hook: Any = None

    def add(self, group: Fp8Group) -> None:
        """Tell this group, for as long as it lives."""
        self._groups.add(group)
        if self._hook is None:
            register_optimizer_step_pre_hook(self._steps)
            self._hook = register_optimizer_step_post_hook(self._stepped)

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in self._trained_by(optimizer):
            group.before_optimizer_step()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in self._trained_by(optimizer):
            group.after_optimizer_step(optimizer)

    def _trained_by(self, optimizer: Optimizer) -> Iterator[Fp8Group]:
        stepped: set[int] | None = None
        for group in list(self._groups):
            if not group.states:
                continue
            if stepped is None:
                stepped = {id(p) for parameters in optimizer.param_groups for p in parameters["params"]}
            if group.trains(stepped):
                yield group


_watch = _OptimizerWatch()

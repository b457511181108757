"""Fp8Group: the FP8 linears of one model, and their shared FP8 state.

A group has one Fp8Config and, for each device with weights, one Fp8State. One state has one amax arena, so an
iteration needs one collective, however many linears there are. The group owns the GEMM sites of its linears
(sites.py). They are created together, in module order, when the first linear runs. By then the weights are on
their final devices (a model may be converted on the meta device and moved later), and all ranks have the same
slots even if their data takes different branches.

``convert_to_fp8`` creates the group of a model. A linear created alone has its own group, until
``fp8_step(model)`` finds it in a model and merges the model's groups.

A copy of a model gets a new group with the same config. A deep copy also copies the histories. A pickled
model starts cold (fp8_state_dict saves histories).
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..files.terminal import warn_user
from ..plan.overrides import check_overrides_match
from ..state.fp8_state import FAST_ACCUMULATION, Fp8State
from ..state.iteration import IterationCounts, trains
from ..state.precision_schedule import PrecisionSchedule
from .config import Fp8Config
from .linear_usage_check import UsageCheck
from .sites import STANDALONE, LinearSites, Preparation
from .weight_provenance import TrainedWeights

if TYPE_CHECKING:
    from .linear import Fp8Layer


UNTRAINABLE = (
    "weights were made FP8 codes by prepare_for_inference, and no gradient trains those: load the weights into a model of"
    " high precision and convert that, or prepare a deep copy (copy.deepcopy) and train the original"
)
"""Warning and error for training of a prepared model."""

MISSING_STEP = (
    "the optimizer stepped and fp8_step was not called: scales and histories would never be updated. Call"
    " megatron_fp8.nn.fp8_step(model) once an iteration, after the last backward, or"
    " register_fp8_step(optimizer, model) once, and again for copies: those of optimizers have no hooks"
)
"""Error of the next training forward after a missing fp8_step."""


class Fp8Group:
    """The FP8 linears of one model.

    Args:
        config: FP8 settings.
        root: the converted model; None for a standalone linear.

    Attributes:
        states: device -> FP8 state.
        sites: of all linears that joined, in module order; includes linears that no longer exist.
        unused: detects linears that do not run.
        trained_weights: weights as training left them.
        delays: some linear has delayed scales.
        making: lock, acquired to create a site.
        frozen: freeze_weights made the weights codes, and adapters around them are trained.
    """

    def __init__(self, config: Fp8Config, root: torch.nn.Module | None = None):
        self.config = replace(config)  # a copy: sites read its overrides later, when they first run
        self.states: dict[torch.device, Fp8State] = {}
        self._iteration = 0  # of a group without states
        self.unused = UsageCheck()
        self.trained_weights = TrainedWeights()
        self.delays = self.frozen = False
        self._said_untrainable = False
        self._resumed = False
        self._unwritten: list[torch.nn.Parameter] = []  # during an optimizer step
        # Number of backwards at the last resume, and at each optimizer's last step.
        self._resumed_at = 0
        self._stepped_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.making = threading.Lock()
        self._phases = PrecisionSchedule()
        self.sites: list[LinearSites] = []
        self._root = None if root is None else weakref.ref(root)
        _groups.add(self)
        _hook_optimizers()

    @staticmethod
    def standalone(config: Fp8Config) -> Fp8Group:
        """The group of one linear outside a model, named STANDALONE. ValueError if an override matches another name
        only."""
        check_overrides_match(config.overrides, [STANDALONE], "overrides")
        return Fp8Group(config)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the config; linears join the group as they are copied."""
        return Fp8Group, (self.config,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp8Group:
        """Copies iteration and phase too: DelayedScaling.interval and stochastic rounding depend on them."""
        copied = memo[id(self)] = Fp8Group(copy.deepcopy(self.config, memo))
        copied._iteration, copied._phases = self.iteration, self._phases
        copied.delays, copied.frozen = self.delays, self.frozen
        for device, state in self.states.items():
            copied.state(device).merge_iteration(state)
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
        """Add a linear of shape (out features, in features). Returns its LinearSites, still empty."""
        self.sites.append(LinearSites(self, linear, name, shape, prepared, also))
        return self.sites[-1]

    def leave(self, *sites: LinearSites) -> None:
        """Remove linears, identified by their sites."""
        self.sites = [s for s in self.sites if s not in sites]

    @property
    def members(self) -> list[tuple[LinearSites, Fp8Layer]]:
        """(sites, linear) of the existing linears, in module order."""
        return [(sites, linear) for sites in self.sites if (linear := sites.linear) is not None]

    @property
    def linears(self) -> list[Fp8Layer]:
        """The existing linears, in module order."""
        return [linear for _, linear in self.members]

    @property
    def names(self) -> list[str]:
        """Names of all linears that joined, in the converted model; includes linears that no longer exist."""
        return [sites.name for sites in self.sites]

    @property
    def root(self) -> torch.nn.Module | None:
        """The converted model, if it still exists."""
        return None if self._root is None else self._root()

    @property
    def is_standalone(self) -> bool:
        """Whether the group has a single linear outside a converted model, and no finished iteration."""
        return self._root is None and len(self.sites) == 1 and self.iteration == 0

    def trains(self, parameters: set[int]) -> bool:
        """Whether the model owns one of the parameters with these ids."""
        return any(id(parameter) in parameters for parameter in self._parameters())

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        if self.root is not None:
            yield from self.root.parameters()
        for linear in self.linears:
            yield from linear.trainable_parameters()

    # --------------------------------------------------------------------------------------------------- state and sites

    def state(self, device: torch.device) -> Fp8State:
        """The state on a device, created on first use."""
        if device not in self.states:
            self.states[device] = Fp8State(
                device,
                iteration=self.iteration,
                phases=self._phases,
                keeps_columnwise=self.config.keep_columnwise,
                fast_gemms=FAST_ACCUMULATION[self.config.fast_accumulation],
                keeps_weights=False,  # training loops, adapters and EMAs write to .data, which leaves no trace
            )
        return self.states[device]

    def make_sites(self, device: torch.device) -> None:
        """Create the sites of all linears whose weight is on this device."""
        for sites, linear in self.members:
            if linear.fp8_device == device:
                sites.on(device)

    def make_all_sites(self) -> None:
        """Create the sites of all linears whose weight is not on the meta device."""
        # In module order, not set order: ranks must reduce their states in the same order, whatever their GPU numbers.
        for device in dict.fromkeys(linear.fp8_device for linear in self.linears):
            if device.type != "meta":
                self.make_sites(device)

    @contextmanager
    def moving(
        self, linears: Sequence[Fp8Layer], sources: Callable[[], Sequence[torch.Tensor]]
    ) -> Iterator[None]:
        """Context around a move of linears. Drops the codes cached on the old device and moves the histories.

        ``sources``: returns the parameters that move.
        """
        before = [linear.fp8_device for linear in linears]
        with self.trained_weights.moving(sources):
            yield
        moved = [
            (one, device) for one, device in zip(linears, before, strict=True) if one.fp8_device != device
        ]
        for linear, device in moved:
            linear.fp8_sites.leave(device)
            linear.fp8_sites.quantize(linear.weight_parameter, linear.fp8_device)
        for device in {device for _, device in moved}:
            self._leave_device(device)

    def _leave_device(self, device: torch.device) -> None:
        """Drop the state on a device that has no weights left: its collectives may no longer work."""
        # Backwards: modules move one by one, so during a move the last one is still on the device.
        members = ((sites, sites.linear) for sites in reversed(self.sites))
        if device in self.states and all(
            linear is None or linear.fp8_device != device for _, linear in members
        ):
            self._iteration = self.iteration
            del self.states[device]
            for sites in self.sites:
                sites.forget(device)

    def set_phases(self, phases: PrecisionSchedule) -> None:
        """Set the precision phases of the training, on all devices, including those used later."""
        self._phases = phases
        for state in self.states.values():
            state.phases = phases
        for sites in self.sites:
            sites.heal()

    @property
    def phases(self) -> PrecisionSchedule:
        """The precision phases of the training."""
        return self._phases

    # -------------------------------------------------------------------------------------------------------- iterations

    def finish_iteration(self, ranks: Any, ran: bool = True) -> IterationCounts:
        """Update scales and histories over these ranks (a process group; None: this process only).

        ``ran`` False: this rank ran nothing. If that is so on all ranks, the iteration does not end.
        """
        self.make_all_sites()
        total, ended = IterationCounts(), ran
        for state in self.states.values():
            state.reduce_over(ranks)
            before = state.iteration
            total.add(state.finish_iteration(ran))
            ended = ended or state.iteration != before
        if ended:
            self._iteration += 1
            self._written_by_training()
        return total

    @property
    def iteration(self) -> int:
        """Number of iterations that ``fp8_step`` and replays of a CapturedStep have finished."""
        return max((state.iteration for state in self.states.values()), default=self._iteration)

    @property
    def _backwards(self) -> int:
        return sum(state.activity.backwards for state in self.states.values())

    def _written_by_training(self) -> None:
        """Record the current parameters as written by training."""
        self._resumed = False
        if self.delays or self.trained_weights.resumed:
            self.trained_weights.record(weight for linear in self.linears for weight in linear.sources)

    def resume(self, iteration: int) -> None:
        """Continue from a saved iteration. The weights may be loaded before or after."""
        self._iteration = iteration
        self.trained_weights, self._resumed, self._resumed_at = TrainedWeights(), True, self._backwards
        for state in self.states.values():
            state.discard_iteration()
            state.iteration = iteration
            state.weight_generation += 1

    def before_optimizer_step(self) -> None:
        """Remember which weights are still as training left them."""
        if self.delays:
            self._unwritten = self.trained_weights.unchanged(
                w for linear in self.linears for w in linear.sources
            )

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Invalidate cached codes. After a training step, require fp8_step before the next forward."""
        for state in self.states.values():
            state.weight_generation += 1  # cached codes are stale, even if a weight's version did not change
        unwritten, self._unwritten = self._unwritten, []
        before = max(self._resumed_at, self._stepped_at.get(optimizer, 0))
        self._stepped_at[optimizer] = self._backwards
        if not trains(optimizer, self._backwards != before):
            self.trained_weights.renew(unwritten)  # this step rewrote the weights with the same values
            return
        self._written_by_training()
        for state in self.states.values():
            if state.counts.fp8_gemms and (state.activity.awaits_backward or state.had_backward):
                state.set_missing_end(MISSING_STEP)

    def loads(self, sites: LinearSites) -> None:
        """Called before a linear's weight is loaded. Resets its histories unless ``resume`` has just loaded them."""
        if not self._resumed:
            sites.reset_histories()
            for state in self.states.values():
                state.weight_generation += 1

    def say_untrainable(self) -> None:
        """Warn once that a prepared model cannot be trained."""
        if not (self._said_untrainable or self.frozen):
            self._said_untrainable = True
            warn_user(
                f"train() of a model whose {UNTRAINABLE}; what is around them, such as adapters, may be trained"
            )


_groups: weakref.WeakSet[Fp8Group] = weakref.WeakSet()


@functools.cache
def _hook_optimizers() -> None:
    """Tells groups, by one global hook a process, when an optimizer of their model steps.

    A hook per group would scan an optimizer's parameters once per group, and linears created one by one each have a
    group.
    """

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in _trained_by(optimizer):
            group.before_optimizer_step()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in _trained_by(optimizer):
            group.after_optimizer_step(optimizer)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _trained_by(optimizer: Optimizer) -> Iterator[Fp8Group]:
    groups = [group for group in _groups if group.states]
    stepped = (
        {id(p) for parameters in optimizer.param_groups for p in parameters["params"]} if groups else set()
    )
    for group in groups:
        if group.trains(stepped):
            yield group

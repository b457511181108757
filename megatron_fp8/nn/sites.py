"""GEMM sites of one linear: one for each device and recipe.

They belong to the model's group (group.py), and the linear refers to them. Rejected: one table in the group, by name,
device and recipe, in which a linear looks itself up. torch.compile guards on what it reads: a name differs from layer to
layer, so each block of a model that is compiled block by block would need a graph of its own.

The references back, to the group and to the linear, are weak. The chain that owns is linear -> group -> sites, without a
cycle: memory of a model that is gone is free at once, and not when Python next looks for cycles.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..linear.fitted import Known, warn_of_replaced
from ..linear.site import GemmSite
from ..params.fp8_parameter import Fp8Parameter
from ..plan.overrides import matching
from ..plan.resolve import resolve
from ..plan.site_plan import SitePlan, bf16_site
from ..plan.size_table import Gemm, load_table
from ..plan.switch import Forwards
from ..plan.timing import device_label
from ..recipe import Recipe, recipe_name
from ..state.arena import Slot
from ..state.saved import load_slots, saved_slots
from .config import Fp8Config

if TYPE_CHECKING:
    from .group import Fp8Group
    from .linear import Fp8Layer

LONE = "linear"
"""What a linear is called that is the whole model, and so has no name there."""

Preparation = Callable[[GemmSite], None]
"""What inference changes in a site that was made by the linear's own recipe, such as static scales."""


class LinearSites:
    """The sites of one linear, made when they are first needed.

    Args:
        group: of the linear's model.
        name: the linear's, in the model that was converted.
        shape: (out features, in features).
        prepared: what inference has changed, told to each site that is made.
        also: other names by which overrides may call the linear.

    Attributes:
        made: (device, '') -> the site by the linear's own recipe, (device, label) -> that by another (Switch.label).
        ready_on: the device for which a call needs to ask nothing: its site is there, and no history has to move to it.
        forwards: the switches around the linear's forwards, for recomputations.
        called: a forward of the linear ran in high precision.
    """

    def __init__(
        self,
        group: Fp8Group,
        linear: Fp8Layer,
        name: str,
        shape: tuple[int, int],
        prepared: Preparation | None = None,
        also: tuple[str, ...] = (),
    ):
        self.name = name
        self.made: dict[tuple[torch.device, str], GemmSite] = {}
        self.ready_on: torch.device | None = None
        self.forwards = Forwards(by_recipe=True)
        self.called = False
        self._ran = False  # in FP8, on sites that are gone
        self._shape, self._prepared, self._also = shape, prepared, also
        self._left: dict[str, GemmSite] = {}  # label -> where it ran before it was moved, until it runs again
        self._loaded: dict[str, Mapping[str, torch.Tensor]] = {}  # label -> histories, until its site is made
        self._group, self._linear = weakref.ref(group), weakref.ref(linear)

    @property
    def linear(self) -> Fp8Layer | None:
        """The linear, if it is alive."""
        return self._linear()

    @property
    def group(self) -> Fp8Group:
        """The group whose these are."""
        group = self._group()
        assert group is not None, "a linear keeps its group"
        return group

    @property
    def has_run(self) -> bool:
        """Whether a call of the linear ran in FP8, by its own recipe or fp8_autocast's."""
        self._ran = self._ran or any(site.has_run for site in self.made.values())
        return self._ran

    @property
    def was_called(self) -> bool:
        """Whether a forward of the linear ran at all."""
        return self.called or self.has_run

    def follow(self, before: LinearSites) -> None:
        """What is known of the linear by other sites, which these take the place of, or are a copy of."""
        self._ran, self.called = before.has_run, before.called

    # ------------------------------------------------------------------------------------------------------ making them

    def get_ready(self, device: torch.device, recipe: Recipe | None) -> bool:
        """Make what a call on this device needs: the own sites of all the group's linears there, so that ranks have the
        same slots in the same order whichever linears they call; and this linear's site by fp8_autocast's recipe.
        Returns whether some were not there, or not ready."""
        before = self.ready_on, len(self.made)
        if (device, "") not in self.made or "" in self._left:
            self.group.make_sites(device)
        own = self.on(device)
        if recipe is not None and own.is_fp8:
            self.on(device, recipe)
        return before != (self.ready_on, len(self.made))

    def on(self, device: torch.device, recipe: Recipe | None = None) -> GemmSite:
        """The site on a device, by fp8_autocast's recipe if one is given; made when first asked for."""
        key = (device, "" if recipe is None else repr(recipe))
        if key not in self.made:
            # Threads that run a model at once must not each give it slots.
            with self.group.making, _disable_current_modes():  # fake tensors and tracers go, the site stays
                if key not in self.made:
                    self.made[key] = self._make(device, recipe)
        site = self.made[key]
        if device.type != "meta":
            if (left := self._left.pop(key[1], None)) is not None:
                take_over(left, site)
            if (loaded := self._loaded.pop(key[1], None)) is not None:
                _load(site, loaded)
        if recipe is None:
            self.ready_on = device
        return site

    def _make(self, device: torch.device, recipe: Recipe | None) -> GemmSite:
        group = self.group
        plan = plan_linear(group.config, self.name or LONE, self._shape, device, recipe, self._also)
        if recipe is not None:  # its slots are others than those of the own recipe
            plan = replace(plan, name=f"{plan.name}@{recipe_name(recipe)}")
        state = group.state(device)
        site = GemmSite(plan, state, None, seed=state.seed, stream=rank())
        site.traced.owner = self._linear
        if site.has_histories:
            group.delays = True
            site.weights.fit(self.known, self._tell)
        if self._prepared is not None and recipe is None:
            self._prepared(site)
        return site

    def by_recipe(self, device: torch.device, label: str) -> GemmSite:
        """The site by fp8_autocast's recipe. RuntimeError: there is none, since traced code entered the region."""
        if (device, label) not in self.made:
            raise RuntimeError(f"{self.name}: enter fp8_autocast(recipe=...) outside of compiled code")
        return self.made[device, label]

    def prepare(self, change: Preparation) -> None:
        """Change the sites by the linear's own recipe for inference: those that are there, and all made later, on other
        devices or for copies."""
        self._prepared = change
        for (_, label), site in self.made.items():
            if not label:
                change(site)

    # ------------------------------------------------------------------------------- histories of fp8_autocast's recipes

    def histories(self, device: torch.device) -> dict[str, Mapping[str, torch.Tensor]]:
        """Label -> what delayed scaling keeps by a recipe of fp8_autocast's, as ``saved_slots`` by role."""
        here = {label: site for (where, label), site in self.made.items() if where == device}
        sites = {
            label: site for label, site in {**here, **self._left}.items() if label and site.has_histories
        }
        return {label: saved_slots(delayed_slots(site)) for label, site in sites.items()} | self._loaded

    def load_histories(self, device: torch.device, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Put back what ``histories`` gave, and make all others cold. A recipe has no site before it is called: until
        then its histories wait here."""
        self._left = {label: site for label, site in self._left.items() if not label}
        self._loaded = dict(saved)
        for (where, label), site in self.made.items():
            if where == device and label and site.has_histories:
                _load(site, self._loaded.pop(label, {}))

    def start_again(self) -> None:
        """Another weight comes, and what the histories know is of the one before: all of them are cold."""
        self._loaded, self._left = {}, {}
        for site in self.made.values():
            for slot in delayed_slots(site).values():
                slot.arena.start_again(slot)

    def known(self) -> Known:
        """What is known of the weight since it got its scale."""
        linear, group = self.linear, self._group()
        if linear is None or group is None:
            return Known()
        return group.left.known(self.name, linear.sources)

    def _tell(self, name: str) -> None:
        self.group.left.told = True
        warn_of_replaced(name)

    # ---------------------------------------------------------------------------------------------- moves and copies

    def quantise(self, weight: Any, device: torch.device) -> None:
        """If the linear's weight lives as codes, what is written there is cast by the site on this device.

        And no longer by that of the device from which it was moved, or of the linear of which it is a copy. Of several
        linears whose weight it is the first one's site casts.
        """
        if not isinstance(weight, Fp8Parameter) or weight.is_gathered or device.type == "meta":
            return
        quantizer = self.on(device).weights.evaluated_by.rowwise
        if quantizer is not None and quantizer.slot.arena is not weight.quantizer.slot.arena:
            weight.quantised_by(quantizer)

    def leave(self, device: torch.device) -> None:
        """The linear was moved from this device: no codes stay there, and its histories go where it runs next."""
        for (where, _), site in self.made.items():
            if where == device:
                site.weights.forget()
        if device.type != "meta":
            self._left |= {label: site for (where, label), site in self.made.items() if where == device}
        self.ready_on = None

    def forget(self, device: torch.device) -> None:
        """The sites on a device are of a state that is gone."""
        self._ran = self.has_run
        self.made = {key: site for key, site in self.made.items() if key[0] != device}

    def of_copy(self, linear: Fp8Layer, group: Fp8Group, memo: dict[int, Any] | None = None) -> LinearSites:
        """Sites for a copy of the linear, of which nothing is made yet; inference's changes go along."""
        prepared = self._prepared if memo is None else copy.deepcopy(self._prepared, memo)
        return group.join(linear, self.name, self._shape, prepared, self._also)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearSites:
        """Those of the linear's copy, in its group's copy, with the histories of delayed scaling as they are now.

        ``memo`` has the linear's copy, whose attributes are being copied: whoever copies a module enters it first.
        """
        linear = self.linear
        assert linear is not None, "a linear is alive while it is copied"
        copied = self.of_copy(memo[id(linear)], copy.deepcopy(self.group, memo), memo)
        device = linear.fp8_device
        copied._loaded = copy.deepcopy(self.histories(device), memo)
        copied.follow(self)
        ran = self.made.get((device, "")) or self._left.get("")
        if ran is not None and ran.has_histories and device.type != "meta":
            take_over(ran, copied.on(device))
        copies = [(weight, memo.get(id(weight))) for weight in linear.sources]
        copied.group.left.note_copies(self.group.left, self.name, copies)
        copied.quantise(memo.get(id(linear.held)), device)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has no slots: what is read back starts cold (fp8_state_dict keeps histories)."""
        return _join, (self.group, self.linear, self.name, self._shape, self._prepared, self._also)


def _join(group: Fp8Group, *of_linear: Any) -> LinearSites:
    """Called by pickle: the linear is there, its attributes are not yet."""
    return group.join(*of_linear)


def plan_linear(
    config: Fp8Config,
    name: str,
    shape: tuple[int, int],
    device: torch.device,
    recipe: Recipe | None = None,
    also: tuple[str, ...] = (),
) -> SitePlan:
    """What a linear of shape (out features, in features) runs on a device, and why.

    Args:
        recipe: in place of the config's.
        also: other names by which overrides may call it.

    Raises:
        ValueError: the backend cannot run there, unless config.fallback is 'warn'; or the size filter's table is wrong.
    """
    plan = resolve(config.asked(recipe), name, None, device, also=also)
    by_name = recipe is not None or matching(name, config.overrides, also)
    if config.size_filter is None or plan.precision == "bf16" or by_name:
        return plan
    assert plan.backend is not None and plan.recipe is not None
    table = load_table(config.size_filter)
    table.check(device_label(device), plan.backend, plan.recipe)
    verdict = table.verdict(Gemm(shape[1], shape[0], table.tokens(config.size_filter_tokens)))
    return plan if verdict.pays else bf16_site(name, None, f"does not pay: {verdict.reason}", "size")


def take_over(old: GemmSite, new: GemmSite) -> None:
    """What a site remembers goes to the one that takes its place: histories, and what this iteration has recorded."""
    for role, quantizer in old.quantizers.items():
        taker = new.quantizers.get(role)
        if quantizer is None or taker is None or quantizer is taker:
            continue
        giver, arena = quantizer.slot, taker.slot.arena
        if giver.delayed is not None:
            arena.load_slot(taker.slot, giver.arena.saved_slot(giver))
        amax, nonfinite = giver.arena.rows[:, giver.index].to(arena.device)
        taker.record(amax, nonfinite)


def delayed_slots(site: GemmSite) -> dict[str, Slot]:
    """Role -> slot, of the operands whose scale is delayed."""
    return {
        role: quantizer.slot
        for role, quantizer in site.quantizers.items()
        if quantizer is not None and quantizer.slot.delayed is not None
    }


def _load(site: GemmSite, saved: Mapping[str, torch.Tensor]) -> None:
    """Put histories into a site; an operand that has none starts cold."""
    slots = delayed_slots(site)
    cold = {
        "scale": torch.ones(1, device="cpu", dtype=torch.float32),
        "amax_history": torch.zeros(1, device="cpu", dtype=torch.float32),
        "warm": torch.zeros(1, device="cpu", dtype=torch.uint8),
    }
    unknown = {f"{role}.{part}": value for role in slots for part, value in cold.items()}
    load_slots(slots, unknown | dict(saved))


def rank() -> int:
    """Data-parallel ranks see other tokens, so stochastic rounding draws other bits; 0 without torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

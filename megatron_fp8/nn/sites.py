"""GEMM sites of one linear: one per device and recipe.

They belong to the model's group (fp8_group.py), and the linear refers to them. Rejected: one table in the group
with keys (name, device, recipe). torch.compile guards on what it reads; since names differ between layers, a
model compiled block by block would need one graph per block.

The references back, to the group and to the linear, are weak. Ownership is linear -> group -> sites, without
a cycle, so the memory of a deleted model is freed at once and not at the next garbage collection.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..linear.gemm_site import GemmSite
from ..linear.weight_cache import WeightFacts, warn_replaced_weight
from ..params.fp8_parameter import Fp8Parameter
from ..plan.autocast_state import Forwards
from ..plan.gemm_size_table import Gemm, load_table
from ..plan.overrides import matching_overrides
from ..plan.resolve import resolve
from ..plan.site_plan import SitePlan, bf16_site, healing_plan
from ..plan.timing import device_label
from ..recipe import Recipe, recipe_name
from ..state.arena import Slot, load_slots, saved_slots
from .config import Fp8Config

if TYPE_CHECKING:
    from .fp8_group import Fp8Group
    from .linear import Fp8Layer

STANDALONE = "linear"
"""Name of a linear that is the whole model and so has no name there."""

Preparation = Callable[[GemmSite], None]
"""Change that inference makes to a site of the linear's own recipe, such as static scales."""


class LinearSites:
    """The sites of one linear, created on first use.

    Args:
        group: the group of the linear's model.
        name: the linear's name in the converted model.
        shape: (out features, in features).
        prepared: change for inference, applied to each new site.
        also: other names under which overrides match the linear.

    Attributes:
        table: (device, label) -> site. The label is '' for the linear's own recipe, else AutocastState.label.
        ready_on: device on which a call needs no preparation: its site exists, and no history is waiting to
            move.
        also: other names under which overrides match the linear.
        forwards: autocast states of the linear's forwards, for recomputation.
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
        self.table: dict[tuple[torch.device, str], GemmSite] = {}
        self.ready_on: torch.device | None = None
        self.forwards = Forwards(by_recipe=True)
        self.called = False
        self._ran = False  # in FP8, on a removed site
        self._shape, self._prepared, self.also = shape, prepared, also
        self._pending: dict[str, GemmSite | Mapping[str, torch.Tensor]] = {}
        """Label -> site before a move, or loaded histories, for the label's next site."""
        self._group, self._linear = weakref.ref(group), weakref.ref(linear)

    @property
    def linear(self) -> Fp8Layer | None:
        """The linear, if it still exists."""
        return self._linear()

    @property
    def group(self) -> Fp8Group:
        """The group that owns these sites."""
        group = self._group()
        assert group is not None, "a linear keeps its group"
        return group

    @property
    def has_run(self) -> bool:
        """Whether a call of the linear ran in FP8, by any recipe."""
        self._ran = self._ran or any(site.has_run for site in self._all_sites())
        return self._ran

    @property
    def was_called(self) -> bool:
        """Whether any forward of the linear ran."""
        return self.called or self.has_run

    def follow(self, before: LinearSites) -> None:
        """Copy the activity of the sites that these replace or copy."""
        self._ran, self.called = before.has_run, before.called

    # ------------------------------------------------------------------------------------------------------ creation

    def create_sites(self, device: torch.device, recipe: Recipe | None) -> bool:
        """Create the sites for a call on this device: those of all linears of the group there, so that all ranks have
        the same slots in the same order; and this linear's site for fp8_autocast's recipe. Returns whether anything was
        missing."""
        before = self.ready_on, len(self.table)
        if (device, "") not in self.table or "" in self._pending:
            self.group.make_sites(device)
        own = self.on(device)
        if recipe is not None and own.is_fp8:
            self.on(device, recipe)
        return before != (self.ready_on, len(self.table))

    def on(self, device: torch.device, recipe: Recipe | None = None) -> GemmSite:
        """The site on a device, for fp8_autocast's recipe if given; created on first use."""
        key = (device, "" if recipe is None else repr(recipe))
        if key not in self.table:
            # Concurrent threads must not create slots twice.
            with (
                self.group.making,
                _disable_current_modes(),
            ):  # the site outlives fake-tensor and tracing modes
                if key not in self.table:
                    self.table[key] = self._make(device, recipe)
        site = self.table[key]
        if device.type != "meta" and (before := self._pending.pop(key[1], None)) is not None:
            if isinstance(before, GemmSite):
                transfer_state(before, site)
            else:
                _load_histories(site, before)
        if recipe is None:
            self.ready_on = device
        return site

    def _make(self, device: torch.device, recipe: Recipe | None) -> GemmSite:
        group = self.group
        plan = plan_linear(group.config, self.name or STANDALONE, self._shape, device, recipe, self.also)
        if recipe is not None:  # it has its own slots
            plan = replace(plan, name=f"{plan.name}@{recipe_name(recipe)}")
        state = group.state(device)
        site = GemmSite(plan, state, None, seed=state.seed, stream=rank())
        site.layer = self._linear
        if site.has_histories:
            group.delays = True
            site.weights.check_scale_in_evaluation(self.weight_facts, self._warn)
        self._heal(site)
        if self._prepared is not None and recipe is None:
            self._prepared(site)
        return site

    def heal(self) -> None:
        """Set what runs in high precision in the group's healing phase, on existing sites."""
        for site in self.table.values():
            self._heal(site)

    def _heal(self, site: GemmSite) -> None:
        site.heal(healing_plan(site.plan, self.group.phases.parts, (self.name or STANDALONE, *self.also)))
        if site.healed is not None and site.has_histories:
            site.healed.weights.check_scale_in_evaluation(self.weight_facts, self._warn)

    def _all_sites(self) -> list[GemmSite]:
        """All sites, with those that act in a healing phase."""
        sites = list(self.table.values())
        return sites + [site.healed for site in sites if site.healed is not None]

    def by_recipe(self, device: torch.device, label: str) -> GemmSite:
        """The site for fp8_autocast's recipe. Raises RuntimeError if it is missing because compiled code entered the
        region."""
        if (device, label) not in self.table:
            raise RuntimeError(f"{self.name}: enter fp8_autocast(recipe=...) outside of compiled code")
        return self.table[device, label]

    def prepare(self, change: Preparation) -> None:
        """Apply a change for inference to all sites of the linear's own recipe: existing ones, and later ones on other
        devices or in copies."""
        self._prepared = change
        for (_, label), site in self.table.items():
            if not label:
                change(site)

    # ------------------------------------------------------------------------------- histories of fp8_autocast's recipes

    def histories(self, device: torch.device) -> dict[str, Mapping[str, torch.Tensor]]:
        """Label -> delayed-scaling state of fp8_autocast's recipes, as ``saved_slots`` by role."""
        current = {label: site for (site_device, label), site in self.table.items() if site_device == device}
        found = {
            label: saved_slots(delayed_slots(of)) if isinstance(of, GemmSite) else of
            for label, of in {**current, **self._pending}.items()
            if label
        }
        return {label: histories for label, histories in found.items() if histories}

    def load_histories(self, device: torch.device, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load the result of ``histories``, and reset all other histories. Histories of a recipe without a site are
        stored until the recipe is first called."""
        self._pending = {label: site for label, site in self._pending.items() if not label} | dict(saved)
        for (site_device, label), site in self.table.items():
            if site_device == device and label and site.has_histories:
                self._pending.pop(label, None)
                _load_histories(site, saved.get(label, {}))

    def reset_histories(self) -> None:
        """Reset all histories, because another weight replaces theirs."""
        self._pending = {}
        for site in self.table.values():
            for slot in delayed_slots(site).values():
                slot.arena.reset_history(slot)

    def weight_facts(self) -> WeightFacts:
        """Facts about the weight since its scale was computed."""
        linear, group = self.linear, self._group()
        if linear is None or group is None:
            return WeightFacts()
        return group.trained_weights.weight_facts(self.name, linear.sources)

    def _warn(self, name: str) -> None:
        self.group.trained_weights.has_warned = True
        warn_replaced_weight(name)

    # ---------------------------------------------------------------------------------------------- moves and copies

    def quantize(self, weight: Any, device: torch.device) -> None:
        """Make the site on this device quantize writes into a weight that is stored as codes.

        It replaces the site of the device before a move, or of the original of a copy. If several linears
        share the weight, the first one's site quantizes it.
        """
        if not isinstance(weight, Fp8Parameter) or weight.is_gathered or device.type == "meta":
            return
        quantizer = self.on(device).weights.evaluation_casts.rowwise
        if quantizer is not None and quantizer.slot.arena is not weight.quantizer.slot.arena:
            weight.quantized_by(quantizer)

    def leave(self, device: torch.device) -> None:
        """Called after a move from this device: drops cached codes and stores the histories for the next device."""
        for (site_device, _), site in self.table.items():
            if site_device == device:
                for each in filter(None, (site, site.healed)):
                    each.weights.forget()
        if device.type != "meta":
            self._pending |= {
                label: site for (site_device, label), site in self.table.items() if site_device == device
            }
        self.ready_on = None

    def forget(self, device: torch.device) -> None:
        """Remove the sites on a device whose state was dropped."""
        self._ran = self.has_run
        self.table = {key: site for key, site in self.table.items() if key[0] != device}

    def of_copy(self, linear: Fp8Layer, group: Fp8Group, memo: dict[int, Any] | None = None) -> LinearSites:
        """Empty sites for a copy of the linear, with the same change for inference."""
        prepared = self._prepared if memo is None else copy.deepcopy(self._prepared, memo)
        return group.join(linear, self.name, self._shape, prepared, self.also)

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearSites:
        """Sites of the linear's copy, in the copied group, with the current histories of delayed scaling.

        ``memo`` contains the linear's copy, because copy.deepcopy enters a module before its attributes.
        """
        linear = self.linear
        assert linear is not None, "a linear is alive while it is copied"
        copied = self.of_copy(memo[id(linear)], copy.deepcopy(self.group, memo), memo)
        device = linear.fp8_device
        copied._pending.update(copy.deepcopy(self.histories(device), memo))
        copied.follow(self)
        # Now, not at the copy's first call: this iteration's amaxes would come into the iteration of that call.
        for label in dict.fromkeys(["", *self._pending, *(label for _, label in self.table)]):
            source = self.table.get((device, label)) or self._pending.get(label)
            if isinstance(source, GemmSite) and source.has_histories and device.type != "meta":
                transfer_state(source, copied.on(device, source.plan.recipe if label else None))
        copies = [(weight, memo.get(id(weight))) for weight in linear.sources]
        copied.group.trained_weights.record_copies(self.group.trained_weights, self.name, copies)
        copied.quantize(memo.get(id(linear.weight_parameter)), device)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle has no slots: it loads cold (fp8_state_dict saves histories)."""
        return _join, (self.group, self.linear, self.name, self._shape, self._prepared, self.also)


def _join(group: Fp8Group, *of_linear: Any) -> LinearSites:
    """Called by pickle before the linear's attributes are loaded."""
    return group.join(*of_linear)


def plan_linear(
    config: Fp8Config,
    name: str,
    shape: tuple[int, int],
    device: torch.device,
    recipe: Recipe | None = None,
    also: tuple[str, ...] = (),
) -> SitePlan:
    """The plan of a linear of shape (out features, in features) on a device.

    Args:
        recipe: replaces the config's recipe.
        also: other names under which overrides match it.

    Raises:
        ValueError: the backend cannot run there, unless config.fallback is 'warn'; or the size filter's table
            is wrong.
    """
    plan = resolve(config.request(recipe), name, None, device, also=also)
    by_name = recipe is not None or matching_overrides(name, config.overrides, also)
    if config.size_filter is None or plan.precision == "bf16" or by_name:
        return plan
    assert plan.backend is not None and plan.recipe is not None
    table = load_table(config.size_filter)
    table.check(device_label(device), plan.backend, plan.recipe)
    verdict = table.verdict(Gemm(shape[1], shape[0], table.tokens(config.size_filter_tokens)))
    return plan if verdict.pays else bf16_site(name, None, f"does not pay: {verdict.reason}", "size")


def transfer_state(old: GemmSite, new: GemmSite) -> None:
    """Move a site's state to its replacement: histories, and the amaxes recorded in this iteration."""
    for role, quantizer in old.quantizers.items():
        new_quantizer = new.quantizers.get(role)
        if quantizer is None or new_quantizer is None or quantizer is new_quantizer:
            continue
        old_slot, arena = quantizer.slot, new_quantizer.slot.arena
        if old_slot.delayed is not None:
            arena.load_slot(new_quantizer.slot, old_slot.arena.saved_slot(old_slot))
        amax, nonfinite = old_slot.arena.rows[:, old_slot.index].to(arena.device)
        new_quantizer.record(amax, nonfinite)


def delayed_slots(site: GemmSite) -> dict[str, Slot]:
    """Role -> slot, for operands with delayed scales."""
    return {
        role: quantizer.slot
        for role, quantizer in site.quantizers.items()
        if quantizer is not None and quantizer.slot.delayed is not None
    }


def _load_histories(site: GemmSite, saved: Mapping[str, torch.Tensor]) -> None:
    """Load histories into a site; operands without saved history start cold."""
    slots = delayed_slots(site)
    cold = {
        "scale": torch.ones(1, device="cpu", dtype=torch.float32),
        "amax_history": torch.zeros(1, device="cpu", dtype=torch.float32),
        "warm": torch.zeros(1, device="cpu", dtype=torch.uint8),
    }
    unknown = {f"{role}.{part}": value for role in slots for part, value in cold.items()}
    load_slots(slots, unknown | dict(saved))


def rank() -> int:
    """This rank's stream for stochastic rounding: data-parallel ranks have different tokens. 0 without
    torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

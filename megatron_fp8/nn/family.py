"""The FP8 linears of one model: what they share, and how each comes to its GEMM site.

A family has one Fp8Config and, for every device its weights are on, one Fp8State: one arena, so one collective an
iteration, however many linears. Sites are made when the first of its linears runs, all together and in module order:
then the weights are where they will be (a model may be converted on the meta device and moved later), and ranks whose
data takes different branches still hold the same slots.

A linear made by itself is a family of its own, until ``fp8_step(model)`` finds it in a model and unites the model's.

A copy of a model is another family: the same plan, state of its own, which has a deep copy's histories as they were then,
and starts cold in what was pickled (fp8_state_dict keeps them).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..linear.site import GemmSite
from ..plan.overrides import check_overrides_match, matching
from ..plan.resolve import resolve
from ..plan.site_plan import SitePlan, bf16_site
from ..plan.size_table import Gemm, load_table
from ..plan.timing import device_label
from ..recipe import Recipe, recipe_name
from ..state.fp8_state import Fp8State
from .config import Fp8Config
from .report import Row

if TYPE_CHECKING:
    from .linear import Fp8Layer


class Family:
    """The FP8 linears of one model.

    Attributes:
        config: how they run.
        states: device -> FP8 state.
        owed: the optimizer stepped after casts that no ``fp8_step`` has settled.
        iteration: how many iterations ``fp8_step`` has finished.
        idle: linears that did not run in the first of them, with their rows of the report before that was seen.
        fp8_iterations: how many of those had FP8 GEMMs, since the model was made.
    """

    def __init__(self, config: Fp8Config, root: torch.nn.Module | None = None):
        self.config = config
        self.states: dict[torch.device, Fp8State] = {}
        self.owed = False
        self.iteration = self.fp8_iterations = 0
        self.idle: dict[str, Row] = {}
        self._members: list[tuple[str, weakref.ref[Fp8Layer]]] = []
        self._root = None if root is None else weakref.ref(root)
        _watch_optimizers(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes the config; its linears join it as they are copied."""
        return {"config": self.config}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(saved["config"])  # type: ignore[misc]

    def join(self, linear: Fp8Layer) -> None:
        """Take in a linear."""
        self._members.append((linear.fp8_name, weakref.ref(linear)))

    def leave(self, linear: Fp8Layer) -> None:
        """Let go of a linear."""
        self._members = [(name, ref) for name, ref in self._members if ref() not in (linear, None)]

    @property
    def members(self) -> list[Fp8Layer]:
        """The linears that are alive, in module order."""
        return [linear for _, ref in self._members if (linear := ref()) is not None]

    @property
    def joined(self) -> int:
        """How many linears joined, those counted that are no more."""
        return len(self._members)

    @property
    def root(self) -> torch.nn.Module | None:
        """The model that was converted, if it is alive."""
        return None if self._root is None else self._root()

    def names(self) -> list[str]:
        """Names of the linears that joined, in the model that was converted."""
        return [name for name, _ in self._members]

    def forget(self, names: list[str]) -> None:
        """Let go of what is no more, and of linears under these names."""
        gone = set(names)
        self._members = [(n, ref) for n, ref in self._members if ref() is not None and n not in gone]

    @property
    def lone(self) -> bool:
        """Whether it is that of one linear which no conversion has put into a model's, and is at its start."""
        return self._root is None and len(self._members) == 1 and self.iteration == 0

    @property
    def waiting(self) -> bool:
        """Whether there are casts, in training, that no ``fp8_step`` has settled."""
        return any(state.counts.fp8_gemms for state in self.states.values())

    def state(self, device: torch.device) -> Fp8State:
        """The state on a device, made on first use."""
        if device not in self.states:
            # Loops, adapters and moving averages write weights through .data, at any time, and nobody is told.
            self.states[device] = Fp8State(device, iteration=self.iteration, keeps_weights=False)
        return self.states[device]

    def bind(self, device: torch.device) -> None:
        """Make the sites of every linear whose weight is on this device."""
        for linear in self.members:
            if linear.weight.device == device:
                linear.make_site(device)

    def leave_device(self, device: torch.device) -> None:
        """Drop the state on a device when no weight is left there: its collectives may not even be possible any more."""
        if device in self.states and all(linear.weight.device != device for linear in self.members):
            del self.states[device]
            for linear in self.members:
                linear.forget_sites(device)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Every parameter of the model: an optimizer that holds one of them trains it."""
        if self.root is not None:
            yield from self.root.parameters()
        for linear in self.members:
            yield from linear.parameters()


def lone_family(config: Fp8Config) -> Family:
    """That of one linear which belongs to no model yet, named LONE. ValueError: an override means another name."""
    check_overrides_match(config.overrides, [LONE], "overrides")
    return Family(config)


LONE = "linear"
"""What a linear is called that no conversion has named."""

_families: weakref.WeakSet[Family] = weakref.WeakSet()
_hook: Any = None


def _watch_optimizers(family: Family) -> None:
    """Every optimizer of torch tells when it stepped; one hook for the process, made with the first family."""
    global _hook
    _families.add(family)
    if _hook is None:
        _hook = register_optimizer_step_post_hook(_after_optimizer_step)


def _after_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Weights of the optimizer's models are other ones now; casts before this step must be settled before the next."""
    stepped: set[int] | None = None
    for family in list(_families):
        if not family.states:
            continue
        if stepped is None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(parameter) in stepped for parameter in family.parameters()):
            family.owed = family.owed or family.waiting
            for state in family.states.values():
                state.weight_generation += (
                    1  # kept codes of the weights are stale, even where no version counter says so
                )


def plan_linear(
    config: Fp8Config, name: str, shape: tuple[int, int], device: torch.device, recipe: Recipe | None = None
) -> SitePlan:
    """What a linear of shape (out features, in features) runs on a device, and why.

    Args:
        recipe: in place of the config's.

    Raises:
        ValueError: the backend cannot run there, unless config.fallback is 'warn'; or the size filter's table is wrong.
    """
    plan = resolve(config.asked(recipe), name, None, device)
    by_name = recipe is not None or matching(name, config.overrides)
    if config.size_filter is None or plan.precision == "bf16" or by_name:
        return plan
    assert plan.backend is not None and plan.recipe is not None
    table = load_table(config.size_filter)
    table.check(device_label(device), plan.backend, plan.recipe)
    verdict = table.verdict(Gemm(shape[1], shape[0], table.tokens(config.size_filter_tokens)))
    return plan if verdict.pays else bf16_site(name, None, f"does not pay: {verdict.reason}")


def site_of(
    family: Family, name: str, shape: tuple[int, int], device: torch.device, recipe: Recipe | None
) -> GemmSite:
    """The site of a linear under its name; under fp8_autocast's recipe it has slots of another name."""
    plan = plan_linear(family.config, name, shape, device, recipe)
    state = family.state(device)
    if recipe is not None:
        plan = replace(plan, name=f"{name}@{recipe_name(recipe)}")
    return GemmSite(plan, state, None, seed=state.seed, stream=rank())


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
        taker.slot.record(amax, nonfinite)


def rank() -> int:
    """Data-parallel ranks see other tokens, so stochastic rounding draws other bits; 0 without torch.distributed."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

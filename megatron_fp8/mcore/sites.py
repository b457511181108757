"""Resolves each linear's GEMM site from the config and the linear's name.

``prepare`` gives every FP8 linear of the model chunks its fully qualified name, with global layer numbers, resolves
its plan and allocates its slots. Megatron's schedules call it through ``set_is_first_microbatch``, before the first
forward; in a custom training loop the model's first forward does. A linear that runs before ``prepare`` (a single
layer in a notebook) is resolved on its own.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from ..files.gc_pause import gc_paused
from ..fp8_utils import get_fp8_recipe, quantizes, recipe_setting
from ..linear.amax_recorder import count_linear
from ..linear.gemm_site import GemmSite
from ..linear.tensor_parallel import ShardInfo, weight_of
from ..plan import resolve as resolver
from ..plan.autocast_state import LayerBeingBuilt
from ..plan.overrides import check_overrides_match, match_flags, matching_overrides
from ..plan.resolve import padded_note, warn_fallback, warn_of_high_precision, warn_padding
from ..plan.site_plan import (
    SitePlan,
    bf16_site,
    check_fp8_site,
    has_fp8_site,
    healing_plan,
)
from ..state.collectives import any_on_ranks, first_rank_with, union
from ..state.fp8_state import Fp8State
from ..state.guard import Move
from . import environment as compat
from .gemm_size_filter import announce, apply_size_table
from .names import named_modules
from .runtime import runtime_of, state_of, unwrap, watch
from .te.context import TeSite
from .unsupported_linears import (
    is_te_linear,
    refuse_fp8_parts,
    refuse_unsupported_layers,
    require_mtp_block,
    unsupported_linears,
)


def resolve(
    config: Any, name: str, layer: LayerBeingBuilt | None, device: torch.device, *, te: bool = False
) -> SitePlan:
    """Returns the plan of one linear. ValueError if FP8 was requested and cannot run (fp8_fallback='warn': a warning
    and BF16).

    Order: FP8 off; first and last layers in BF16; overrides by name (so they can put such a layer back into FP8);
    recipe.

    Args:
        te: the linear is Transformer Engine's.
    """
    number = _layer_number(layer)
    if not quantizes(config):
        return bf16_site(name, number, "fp8 is off")
    reason = None if layer is None else layer.bf16_reason
    return resolver.resolve(
        site_request(config), name, number, device, bf16_reason=reason, layers=True, brings_own=te
    )


def _layer_number(layer: LayerBeingBuilt | None) -> int | None:
    return None if layer is None or layer.number < 0 else layer.number


def site_request(config: Any, overrides: Mapping[str, Any] | None = None) -> resolver.SiteRequest:
    """Returns the FP8 request of a config that has FP8 on; with these overrides in place of its own, if given."""
    overrides = overrides or getattr(config, "fp8_overrides", None) or {}
    return resolver.SiteRequest(
        get_fp8_recipe(config),
        resolver.named_recipes(overrides, lambda name: get_fp8_recipe(config, name)),
        reason=f"{recipe_setting(config).replace('_', ' ')} of the config",
        overrides=overrides,
        fp8_wgrad=config.fp8_wgrad,
        backend=getattr(config, "fp8_backend", None),
        warn=getattr(config, "fp8_fallback", "error") == "warn",
        prefix="fp8_",
        dtype="BF16",
        faster="fp8='e4m3' (--model.fp8=e4m3)",
    )


class PlanCache:
    """Caches what equal linears of one model share during planning: their plan, except for its name, and their ranks.
    So a warning appears once and not for each linear."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], SitePlan] = {}
        self._ranks: dict[tuple[Any, ...], tuple[Any, int]] = {}

    def resolve(
        self, config: Any, name: str, layer: LayerBeingBuilt | None, device: torch.device, *, te: bool
    ) -> SitePlan:
        """As the function ``resolve``, for a linear that no override names."""
        key = id(config), None if layer is None else layer.bf16_reason, device, te
        if (cached := self._plans.get(key)) is not None:
            return cached.of(name, _layer_number(layer))
        plan = resolve(config, name, layer, device, te=te)
        if plan.cause != "fallback":  # each fallback has its own warning and reason
            self._plans[key] = plan
        return plan

    def ranks(self, config: Any, *, expert: bool) -> tuple[Any, int]:
        """Returns the group that reduces a linear's amaxes, and the random stream of this rank's tokens."""
        key = id(config), expert
        if key not in self._ranks:
            stream = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            self._ranks[key] = compat.amax_group(config, expert=expert), stream
        return self._ranks[key]


def plan_of(linear: Any, name: str, state: Fp8State, cache: PlanCache | None = None) -> SitePlan:
    """Returns the plan of an FP8 linear, or of an equal linear of this name on another rank.

    The size filter and the guard come last, and change only sites that run the config's recipe: an override by name
    stays.
    """
    config, layer, device = linear.config, linear.fp8_layer, weight_of(linear).device
    te = is_te_linear(linear)
    if matching_overrides(name, getattr(config, "fp8_overrides", None) or {}):
        return resolve(config, name, layer, device, te=te)
    plan = apply_size_table(
        config, (cache or PlanCache()).resolve(config, name, layer, device, te=te), linear
    )
    move = None if state.guard is None else state.guard.moves.get(name)
    return plan if move is None else _moved_plan(config, plan, move, linear)


def make_site(linear: Any, name: str, state: Fp8State | None = None, cache: PlanCache | None = None) -> Any:
    """Makes the GemmSite, or TeSite, of an FP8 linear under this name.

    Args:
        state: the model's FP8 state (some modules hold a copy of the config).
        cache: the cache of the model's planning.
    """
    config, cache = linear.config, cache or PlanCache()
    state = state or state_of(config)
    plan = plan_of(linear, name, state, cache)
    if is_te_linear(linear):
        return TeSite(plan, state)
    group, stream = None, 0
    if plan.precision == "fp8" and parallel_state.model_parallel_is_initialized():
        group, stream = cache.ranks(config, expert=linear.is_expert)
    site = GemmSite(plan, state, group, seed=state.seed, stream=stream)
    site.heal(healing_plan(plan, state.phases.parts))
    return site


def site_with(linear: Any, overrides: Mapping[str, Any]) -> GemmSite:
    """Makes the GemmSite that a linear with a GemmSite would have with these overrides in place of its config's."""
    config, site = linear.config, linear.fp8_site
    device = weight_of(linear).device
    plan = resolver.resolve(
        site_request(config, overrides), site.plan.name, site.plan.layer, device, layers=True
    )
    group = None
    if plan.precision == "fp8" and parallel_state.model_parallel_is_initialized():
        group = compat.amax_group(config, expert=linear.is_expert)
    return GemmSite(plan, site.state, group, seed=site.seed, stream=site.stream)


def share_of(kind: Literal["column", "row"], *, expert: bool) -> ShardInfo:
    """Returns this rank's part of a linear that is split over tensor-parallel ranks; ``expert``: over experts' ranks."""
    ps = parallel_state
    if not ps.model_parallel_is_initialized():
        return ShardInfo()
    if expert:
        size, part = ps.get_expert_tensor_parallel_world_size(), ps.get_expert_tensor_parallel_rank()
        tokens = ps.get_expert_data_parallel_rank()
    else:
        size, part = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
        tokens = ps.get_data_parallel_rank(with_context_parallel=True)
    return ShardInfo(kind if size > 1 else "none", part, tokens)


def _moved_plan(config: Any, plan: SitePlan, move: Move, linear: Any) -> SitePlan:
    """Returns the plan of a site that the guard has moved."""
    reason = f"fp8_guard, from iteration {move.iteration + 1} on: {move.why}"
    if move.to == "bf16" or plan.precision == "bf16":
        return bf16_site(plan.name, plan.layer, reason, "guard")
    request = site_request(config, {plan.name: move.to})
    plan_after = resolver.resolve(request, plan.name, plan.layer, weight_of(linear).device, layers=True)
    return dataclasses.replace(plan_after, reason=reason, cause="guard")


@gc_paused()
def prepare(model_chunks: list[Any]) -> None:
    """Names, plans and allocates every site of this rank's model chunks; skips prepared chunks.

    Of a model inside another (LLaVA's language model) it prepares the outermost, whichever runs first: names, scales and
    counts are the whole model's.

    Raises:
        ValueError: FP8 cannot run as requested, or the settings leave no site in FP8; layers are not this package's,
            or those of multi-token prediction are missing; or the config has phases in high precision and the
            training's length is not set.
    """
    for chunk in model_chunks:
        if (part := unwrap(chunk)) in prepared_models:
            continue
        model = outermost_model(part)
        runtime = runtime_of(model.config)
        refuse_unsupported_layers(model)
        refuse_fp8_parts(model)
        require_mtp_block(model)
        state = state_of(model.config)
        if quantizes(model.config) and not state.phases.trivial:
            state.phases.require_length()
        if quantizes(model.config) and parallel_state.model_parallel_is_initialized():
            # Made on every rank: a rank without FP8 sites in a group with some then raises an error instead of hanging.
            state.arena(compat.amax_group(model.config, expert=False))
        named, cache = list(named_modules(model)), PlanCache()
        for name, module in named:
            if hasattr(type(module), "bind_fp8_site"):
                module.bind_fp8_site(make_site(module, name, state, cache))
            elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                count_plain_linear(module, state)
        for name, module in named:
            if (dispatch := vars(module).get("fp8_dispatch")) is not None:  # its experts have their sites now
                dispatch.bind(f"{name}.dispatch", state)
        linears = [module for _, module in named if hasattr(type(module), "bind_fp8_site")]
        plans = [linear.fp8_site.plan for linear in linears]
        announce(plans)
        padded = {}
        for linear, plan in zip(linears, plans, strict=True):
            weight = weight_of(linear)
            if note := padded_note(plan, weight.device, *weight.shape):
                padded[plan.name] = note
                linear.fp8_site.notes.add(note)
        warn_padding(padded, len(plans))
        warn_of_high_precision(plans, "fp8='e4m3' (--model.fp8=e4m3)")
        # Where ranks hold different sites, check_plan checks all of them together.
        parts = model.config.pipeline_model_parallel_size * model.config.expert_model_parallel_size
        if quantizes(model.config) and parts == 1:
            check_fp8_site((plan.precision, plan.cause, plan.reason) for plan in plans)
        if hasattr(model.config, "freeze"):
            model.config.freeze()
        if quantizes(model.config) and not runtime.prepared:
            watch(runtime)
        runtime.prepared.add(model)
        prepared_models.update(m for m in model.modules() if m is model or m is part or is_model(m))


prepared_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Prepared models and the models inside them: preparing a part again would name its sites anew."""

_built: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
"""Models, and modules of others that may hold models, in the order of their construction."""


def register_model(module: torch.nn.Module) -> None:
    """Lets ``prepare`` find a module as the model around a part; leaves out Megatron-Core's layers and wrappers."""
    if is_model(module) or not type(module).__module__.startswith(("megatron.core.", "megatron_fp8.")):
        _built[module] = None


def outermost_model(model: Any) -> Any:
    """Returns the outermost registered module that contains this model and still exists; without one, the model."""
    found = model
    for other in list(_built):
        if other is not found and any(part is found for part in other.modules()):
            found = other
    return found


def is_model(module: Any) -> bool:
    """Whether a module is one of Megatron-Core's models, or of a derived class: GPT, BERT, T5, vision, multimodal."""
    kind: Any = type(module)
    return _is_model(kind)


@functools.lru_cache(maxsize=256)
def _is_model(kind: type) -> bool:
    return any(base.__module__.startswith("megatron.core.models.") for base in kind.__mro__)


@contextmanager
def cache_weights(model_chunks: list[Any]) -> Iterator[None]:
    """Caches quantized weights of these chunks inside; Megatron's schedule resets the cache (is_first_microbatch)."""
    configs = [unwrap(chunk).config for chunk in model_chunks]
    states = [state_of(config) for config in configs if quantizes(config)]
    for state in states:
        state.keeps_weights = True
        state.weight_generation += 1  # earlier cached weights may be stale
    try:
        yield
    finally:
        for state in states:
            state.keeps_weights = False


def fp8_linears(model_chunks: list[Any]) -> list[Any]:
    """Returns this rank's FP8-capable linears, in module order."""
    return [m for chunk in model_chunks for m in unwrap(chunk).modules() if hasattr(type(m), "bind_fp8_site")]


@gc_paused()
def check_plan(model_chunks: list[Any]) -> None:
    """Checks what depends on the sites of all ranks; prepares the chunks. Collective; the same on all ranks.

    The first rank prints which linears of any rank fell back to high precision.

    Raises:
        ValueError: an fp8_overrides glob matches no site, the settings leave none in FP8, or some rank cannot prepare
            its chunks.
    """
    models = [unwrap(chunk) for chunk in model_chunks]
    config = models[0].config
    error_here = None
    try:
        prepare(model_chunks)
    except ValueError as error:  # may concern this rank alone: the others would wait for it
        error_here = error
    overrides = getattr(config, "fp8_overrides", None) or {}
    if error_here is None and not quantizes(config):
        return
    _raise_on_all_ranks(error_here)
    plans = [linear.fp8_site.plan for linear in fp8_linears(model_chunks)]
    entries = {plan.name: (plan.precision, plan.cause, plan.reason) for plan in plans}
    foreign = [name for model in models for name in unsupported_linears(model)]
    entries |= dict.fromkeys(foreign, ("bf16", "asked", ""))
    parts = dict.fromkeys(state_of(config).phases.parts)
    # Site names are exchanged only if an error message needs them.
    if not all(any_on_ranks([*match_flags(overrides, entries), *match_flags(parts, entries)])):
        names = union(entries)
        check_overrides_match(overrides, names)
        check_overrides_match(parts, names, "fp8_high_precision_healing_parts")
    fallbacks = {name: reason for name, (_, cause, reason) in entries.items() if cause == "fallback"}
    any_left, any_fallen = any_on_ranks([has_fp8_site(entries.values()), bool(fallbacks)])
    if not any_left:
        check_fp8_site(union(entries).values())
    if any_fallen:
        for name, reason in union(fallbacks).items():
            warn_fallback(name, site_request(config).dtype, reason)
    runtime_of(config).checked.update(models)


def is_checked(model_chunks: list[Any]) -> bool:
    """Whether ``check_plan`` has accepted these chunks."""
    models = [unwrap(chunk) for chunk in model_chunks]
    return runtime_of(models[0].config).checked.issuperset(models)


def _raise_on_all_ranks(refused: ValueError | None) -> None:
    """Raises the same ValueError on every rank if any rank has one. Collective."""
    if (message := first_rank_with(None if refused is None else str(refused))) is not None:
        raise ValueError(message[1]) from refused


def count_plain_linear(module: Any, state: Fp8State) -> None:
    """Counts the GEMMs of a linear that is no FP8 site (such as the output projection) as high-precision GEMMs."""

    def count(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        weight = kwargs.get("weight")  # the embedding's where they are tied, else None
        weight = module.weight if weight is None else weight
        x = args[0] if args else kwargs["input_"]
        count_linear(state, x, weight, out, training=module.training)

    module.register_forward_hook(count, with_kwargs=True)

"""Resolves settings, a name and a device to a plan entry.

Each front end says what its user asked for as ``Asked``: Megatron's config in mcore/sites.py, an Fp8Config in
nn/config.py, the arguments of a product in nn/matmul.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..backends import LAYER_BACKENDS, choose_backend, say_what_is_slow
from ..recipe import RECIPES, Recipe, refuse_e5m2_twice
from .notices import say_fallback
from .operands import Choices
from .overrides import matching
from .site_plan import SitePlan, bf16_site, chosen_site


@dataclass(frozen=True)
class Asked:
    """What a user asks for, of all linears of a model alike.

    Args:
        recipe: the recipe of a name, with the user's options; of None, the one for all linears.
        reason: why that one, as the report will say it.
        overrides: as plan/overrides.py has them.
        fp8_wgrad: False keeps wgrad in high precision.
        unquantized: roles that stay in high precision.
        backend: one's name, 'auto' or None.
        warn: a linear that cannot run as asked is left in high precision, said and reported, in place of an error.
        prefix: what the names of these settings begin with: 'fp8_' in Megatron's config.
        dtype: what high precision is called.
        faster: the setting that makes gradients E4M3, which some GPUs multiply faster.
    """

    recipe: Callable[[str | None], Recipe]
    reason: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    fp8_wgrad: bool = True
    unquantized: tuple[str, ...] = ()
    backend: str | None = None
    warn: bool = False
    prefix: str = ""
    dtype: str = "high precision"
    faster: str = "backward_format='e4m3', or fp8_format=Format.E4M3 in a recipe,"


def resolve(
    asked: Asked,
    name: str,
    layer: int | None,
    device: torch.device,
    *,
    bf16_reason: str | None = None,
    layers: bool = False,
    brings_own: bool = False,
    also: tuple[str, ...] = (),
) -> SitePlan:
    """The plan of one linear. Overrides by name come last, and therefore can put a layer back.

    Args:
        asked: what the user asked for.
        name: the linear's.
        layer: its global number, if it has one.
        device: where it runs.
        bf16_reason: why its layer stays in high precision, None if it does not.
        layers: whether backends that have layers of their own may be chosen.
        brings_own: whether the linear is one of such a backend's.
        also: other names by which overrides may call it, such as that of the experts that it is one of.

    Raises:
        ValueError: FP8 was asked for and cannot run.
    """
    try:
        choices = choose(asked, name, bf16_reason, also)
        if choices.none_in_fp8:
            return bf16_site(name, layer, "; ".join(choices.reasons))
        products = choices.products() if choices.edited else choices.recipe
        try:
            backend, why = choose_backend(asked.backend, device, products, layers=layers)
        except ValueError as error:
            if not choices.overridden:
                raise  # asked alike of all linears: one name would mislead
            raise ValueError(f"{_with_reasons(name, choices)}: {error}") from error
        if brings_own != (backend.name in LAYER_BACKENDS):
            raise ValueError(
                f"{name} is {'a Transformer Engine layer' if brings_own else 'no Transformer Engine layer'}, and the"
                f" backend is {backend.name!r}: build the model from"
                " megatron_fp8.mcore.spec.get_gpt_layer_fp8_spec(config), which takes the layers of config.fp8_backend"
            )
    except ValueError as error:
        if not asked.warn:
            raise
        plan = bf16_site(name, layer, f"{asked.prefix}fallback: {error}", "fallback")
        say_fallback(name, asked.dtype, plan.reason)
        return plan
    say_what_is_slow(backend.name, device, products, asked.faster)
    made = choices.plans.get((backend.name, why))
    if made is None:
        reason = "; ".join(choices.reasons)
        reason = f"{reason}; backend {why}" if reason else f"backend: {why}"
        made = choices.plans[backend.name, why] = chosen_site(name, layer, backend.name, reason, choices)
    return made.of(name, layer)


def choose(asked: Asked, name: str, bf16_reason: str | None = None, also: tuple[str, ...] = ()) -> Choices:
    """What a linear of that name multiplies, wherever it will run; arguments and errors as ``resolve``'s."""
    recipe, overrides = asked.recipe(None), matching(name, asked.overrides, also)
    key = id(recipe), asked.reason, asked.unquantized, asked.fp8_wgrad, bf16_reason
    known = None if overrides else _ALIKE.get(key)
    if known is not None:
        return known
    choices = Choices(
        recipe,
        asked.reason,
        unquantized=asked.unquantized,
        fp8_wgrad=asked.fp8_wgrad,
        bf16_reason=bf16_reason,
    )
    if not overrides:
        if len(_ALIKE) >= _MOST_ALIKE:
            _ALIKE.clear()
        _ALIKE[key] = choices  # which keep the recipe, so that no other has its id
    for override in overrides:
        choices.apply(override, _named(asked, override.value), f"{asked.prefix}overrides")
    if choices.edited:
        refuse_e5m2_twice(choices.products(), _with_reasons(name, choices))
    return choices


def _with_reasons(name: str, choices: Choices) -> str:
    """What an error calls a linear of which overrides speak: its name, and what they say."""
    return f"{name} ({'; '.join(choices.reasons)})"


_ALIKE: dict[tuple[Any, ...], Choices] = {}
"""Those of linears of which nothing is said by name: a model of 100,000 asks as often."""
_MOST_ALIKE = 256


def _named(asked: Asked, value: Any) -> Recipe | None:
    """The recipe that an override's value names; None: it names none."""
    if isinstance(value, Recipe):
        return value
    if value == "fp8":
        return asked.recipe(None)
    return asked.recipe(value) if value in RECIPES else None

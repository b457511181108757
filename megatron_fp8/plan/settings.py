"""Resolves recipe settings of users to a recipe, for Megatron-Core and nn.

A setting reaches a recipe that has a field of its name, and no other. So a new recipe that has a margin gets the user's,
without a word here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..numerics.formats import Format
from ..recipe import RECIPES, CustomRecipe, Recipe, check_recipe_name

FP8_FORMATS = tuple(fmt.value for fmt in Format)
"""What the setting `fp8` may be, where FP8 is on."""

DEFAULT_RECIPE = "tensorwise"
"""The recipe of every entry of this package's own, where nobody names one. Megatron-Core's own config has 'delayed'."""


def field_meant(fp8_format: Any) -> str:
    """The setting that `fp8_format` is another name of: `fp8` if it names element formats, else `fp8_recipe`."""
    return "fp8" if fp8_format in FP8_FORMATS else "fp8_recipe"


def exchanged(name: str, value: Any) -> str | None:
    """What to write in the place of ``name=value``, where ``fp8`` got a recipe's name or ``fp8_recipe`` formats; or None.

    Args:
        name: the setting, perhaps with its section before it: 'model.fp8'.
    """
    section, dot, last = name.rpartition(".")
    if last == "fp8" and value in tuple(RECIPES):
        return f"{value!r} is a recipe: write {name}='hybrid' and {section}{dot}fp8_recipe={value!r}"
    if last == "fp8_recipe" and value in FP8_FORMATS:
        return f"{value!r} names element formats: write {section}{dot}fp8={value!r}"
    return None


NOT_A_KEY = "model.fp8 (hybrid, e4m3) or model.fp8_recipe (tensorwise, mxfp8, ...)"
"""What is offered for `fp8_format`, which other programs have in both meanings."""


def without_fp8_format(section: Mapping[str, Any]) -> dict[str, Any]:
    """A model section with what its `fp8_format` says under the name that it means. ValueError: that says otherwise."""
    found = dict(section)
    if "fp8_format" not in found:
        return found
    value = found.pop("fp8_format")
    name = field_meant(value)
    if value is not None and found.get(name) not in (None, value):
        raise ValueError(
            f"fp8_format={value!r} conflicts with {name}={found[name]!r}: both name one thing. Give {name} alone."
        )
    if value is not None or name not in found:
        found[name] = value
    return found


def refuse_recipe_alone(recipe: str | None, *, fp8_given: bool) -> None:
    """ValueError if a model section names a recipe while FP8 is neither on nor off by name: the run would be in BF16."""
    if recipe is not None and not fp8_given:
        raise ValueError(
            f"model.fp8_recipe={recipe!r} without model.fp8, which would train in BF16: give model.fp8=hybrid or e4m3 (or"
            " model.fp8=null, to have FP8 off)."
        )


@dataclass(frozen=True)
class RecipeSettings:
    """What may be said of recipes, whichever it will be.

    Args:
        fp8_format, margin, amax_epsilon, stochastic_rounding, amax_history_len, amax_compute_algo, interval: as the
            recipes' own fields; None leaves the recipe's own.
        pow2_scales: True and False say what scales are, where the recipe leaves the choice.
        quantizer_factory: 'package.module.function' of a custom recipe.
        prefix: what the user's names have before these: 'fp8_' in Megatron's config.
    """

    fp8_format: Format | str | None = None
    margin: int = 0
    amax_epsilon: float | None = None
    pow2_scales: bool | None = None
    stochastic_rounding: bool | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    interval: int | None = None
    quantizer_factory: str | None = None
    prefix: str = ""


def takes(name: str, field: str) -> bool:
    """Whether the recipe of that name has a field of that name."""
    return field in getattr(RECIPES[name], "__dataclass_fields__", {})


def from_settings(name: str, settings: RecipeSettings) -> Recipe:
    """The recipe of that name, with those settings that it has.

    Raises:
        ValueError: the name is unknown, a value cannot be, or there is no margin to set.
    """
    # types tell 0 from 0.0 and False, as a recipe does
    said = name, settings, *map(type, vars(settings).values())
    try:
        found = _MADE.get(said)
    except TypeError:  # a list, say, which no recipe takes
        return _made(name, settings)
    if found is None:
        found = _made(name, settings)
        if not isinstance(found, CustomRecipe):  # what a user's function says may change
            _MADE[said] = found
    return found


_MADE: dict[tuple[Any, ...], Recipe] = {}
"""Recipes by what was said of them: a model of 100,000 linears asks as often."""


def _made(name: str, settings: RecipeSettings) -> Recipe:
    prefix = settings.prefix
    if RECIPES[check_recipe_name(name)] is CustomRecipe:
        return _custom(settings.quantizer_factory, prefix)
    if settings.margin and not takes(name, "margin"):
        recipe = f"{prefix}recipe={name!r}" if prefix else repr(name)
        raise ValueError(
            f"{prefix}margin={settings.margin} does not exist for {recipe}: only per-tensor scales (delayed, tensorwise)"
            f" keep headroom; set {prefix}margin=0"
        )
    pow2 = settings.pow2_scales
    asked = {
        **vars(settings),
        "use_power_2_scales": pow2,
        "use_f32_scales": None if pow2 is None else not pow2,
    }
    return RECIPES[name](
        **{field: value for field, value in asked.items() if value is not None and takes(name, field)}
    )


def _custom(path: str | None, prefix: str) -> CustomRecipe:
    field = f"{prefix}quantizer_factory"
    factory = import_factory(path, field)
    try:
        return CustomRecipe(factory)
    except Exception as error:  # user code: whatever it raises is the reason to show
        raise ValueError(
            f"{field}={path!r} cannot be used ({type(error).__name__}: {error}): it must take 'input', 'weight' or"
            " 'grad_output' and return a Rule, a recipe or None"
        ) from error


def import_factory(path: str | None, field: str = "fp8_quantizer_factory") -> Callable[..., Any]:
    """The function at an import path. ValueError, naming the field that had the path, where there is none."""
    remedy = f"give {field} as 'package.module.function'"
    if not isinstance(path, str) or not path:
        raise ValueError(f"a custom recipe needs a factory and {field} is {path!r}: {remedy}")
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        raise ValueError(f"{field}={path!r} is not an import path, it names no module: {remedy}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # user code: whatever its import raises is the reason to show
        raise ValueError(
            f"{field}={path!r} cannot be imported ({type(error).__name__}: {error}): {remedy}"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise ValueError(
            f"{field}={path!r} cannot be imported: {module_name!r} has no such attribute; {remedy}"
        )
    if not callable(factory):
        raise ValueError(
            f"{field}={path!r} is not callable: {module_name!r} has a {type(factory).__name__} there; {remedy}"
        )
    return factory

"""Resolves users' recipe settings to a recipe, for Megatron-Core and nn.

Unknown config keys get suggestions: typos, wrong sections, names in other programs. A recipe receives the settings for
which it has a field of the same name. So a new recipe with a margin gets the user's margin without a change here.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..numerics.formats import Format
from ..recipe import RECIPES, CustomRecipe, Recipe, check_recipe_name

FP8_FORMATS = tuple(fmt.value for fmt in Format)
"""Valid values of the setting `fp8`, other than off."""

FP4_OPTIONS = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
"""NVFP4's options by its recipe's names; in a Megatron config they begin with 'fp4_'."""

DEFAULT_RECIPE = "tensorwise"
"""The default recipe of this package's own interfaces. Megatron-Core's own config has 'delayed'."""


def fp8_format_field(fp8_format: Any) -> str:
    """Returns the setting for which `fp8_format` is another name: `fp8` for element formats, else `fp8_recipe`."""
    return "fp8" if fp8_format in FP8_FORMATS else "fp8_recipe"


def exchange_hint(name: str, value: Any) -> str | None:
    """Returns a correction of ``name=value`` if ``fp8`` has a recipe's name or ``fp8_recipe`` has formats; else None.

    Args:
        name: the setting, with or without its section: 'model.fp8'.
    """
    section, dot, last = name.rpartition(".")
    if last == "fp8" and value in tuple(RECIPES):
        return f"{value!r} is a recipe: write {name}='hybrid' and {section}{dot}fp8_recipe={value!r}"
    if last == "fp8_recipe" and value in FP8_FORMATS:
        return f"{value!r} names element formats: write {section}{dot}fp8={value!r}"
    return None


NOT_A_KEY = "model.fp8 (hybrid, e4m3) or model.fp8_recipe (tensorwise, mxfp8, ...)"
"""The suggestion for `fp8_format`, which other programs use in both meanings."""


def without_fp8_format(section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model section with `fp8_format` renamed to the setting it means. ValueError: both are set and differ."""
    found = dict(section)
    if "fp8_format" not in found:
        return found
    value = found.pop("fp8_format")
    name = fp8_format_field(value)
    if value is not None and found.get(name) not in (None, value):
        raise ValueError(
            f"fp8_format={value!r} conflicts with {name}={found[name]!r}: both name one thing. Give {name} alone."
        )
    if value is not None or name not in found:
        found[name] = value
    return found


def refuse_recipe_alone(recipe: str | None, *, fp8_given: bool) -> None:
    """Raises ValueError if a model section names a recipe without setting or disabling FP8: it would run in BF16."""
    if recipe is not None and not fp8_given:
        raise ValueError(
            f"model.fp8_recipe={recipe!r} without model.fp8, which would train in BF16: give model.fp8=hybrid or e4m3 (or"
            " model.fp8=null, to have FP8 off)."
        )


def entry_format(precision: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns ('FP8 hybrid', 'mxfp8') or ('FP4 e2m1', 'nvfp4') of a report's or a checkpoint's entry; None if its run
    quantized nothing."""
    for switch in ("fp8", "fp4"):
        if precision.get(switch):
            return f"{switch.upper()} {precision[switch]}", str(
                precision.get(f"{switch}_recipe", "recipe not known")
            )
    return None


@dataclass(frozen=True)
class RecipeSettings:
    """Settings for recipes of any kind.

    Args:
        fp8_format, margin, amax_epsilon, stochastic_rounding, amax_history_len, amax_compute_algo, interval: as the
            recipes' fields; None leaves the recipe's default.
        pow2_scales: whether scales are powers of two, if the recipe has the choice.
        quantizer_factory: 'package.module.function' of a custom recipe.
        disable_rht, disable_stochastic_rounding, disable_2d_quantization: as NVFP4's fields.
        prefix: prefix of the user's names for recipe and factory: 'fp8_' or 'fp4_' in Megatron's config.
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
    disable_rht: bool | None = None
    disable_stochastic_rounding: bool | None = None
    disable_2d_quantization: bool | None = None
    prefix: str = ""


def has_setting(name: str, field: str) -> bool:
    """Whether the recipe of that name has a field of that name."""
    return field in getattr(RECIPES[name], "__dataclass_fields__", {})


def from_settings(name: str, settings: RecipeSettings) -> Recipe:
    """Returns the recipe of that name, with those of the settings that it has.

    Raises:
        ValueError: the name is unknown, a value is invalid, or the recipe has no margin to set.
    """
    # with the types, since 0 == 0.0 == False, and recipes distinguish them
    key = name, settings, *map(type, vars(settings).values())
    try:
        found = _CACHE.get(key)
    except TypeError:  # not hashable, such as a list, which no recipe takes
        return _make_recipe(name, settings)
    if found is None:
        found = _make_recipe(name, settings)
        if not isinstance(found, CustomRecipe):  # a user's function may return something else later
            _CACHE[key] = found
    return found


_CACHE: dict[tuple[Any, ...], Recipe] = {}
"""Cache of recipes by name and settings: a model with 100,000 linears makes as many lookups."""


def _make_recipe(name: str, settings: RecipeSettings) -> Recipe:
    prefix = settings.prefix
    if RECIPES[check_recipe_name(name)] is CustomRecipe:
        return _custom(settings.quantizer_factory, prefix)
    if settings.margin and not has_setting(name, "margin"):
        recipe = f"{prefix}recipe={name!r}" if prefix else repr(name)
        margin = "fp8_margin" if prefix else "margin"
        raise ValueError(
            f"{margin}={settings.margin} does not exist for {recipe}: only per-tensor scales (delayed, tensorwise)"
            f" keep headroom; set {margin}=0"
        )
    pow2 = settings.pow2_scales
    options = {
        **vars(settings),
        "use_power_2_scales": pow2,
        "use_f32_scales": None if pow2 is None else not pow2,
    }
    return RECIPES[name](
        **{field: value for field, value in options.items() if value is not None and has_setting(name, field)}
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
    """Returns the function at an import path. ValueError, which names ``field``, if the path leads to no function."""
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


OTHER_WORDS = {
    "train.train_iters": "iters iterations steps max_steps num_steps epochs num_epochs num_train_epochs",
    "train.micro_batch_size": "batch_size local_batch_size per_device_train_batch_size",
    "train.global_batch_size": "gradient_accumulation_steps",
    "train.seq_length": "seq_len sequence_length max_seq_len max_length context_length block_size",
    "optimizer.lr": "learning_rate",
    "optimizer.lr_warmup_iters": "warmup warmup_steps warmup_iters",
    "optimizer.clip_grad": "max_grad_norm max_norm",
    "model.fp8_recipe": "recipe",
    "model.num_layers": "n_layers layers num_hidden_layers",
    "model.tensor_model_parallel_size": "tp tp_size tensor_parallel_size tensor_parallel_degree",
    "model.pipeline_model_parallel_size": "pp pp_size pipeline_parallel_size pipeline_parallel_degree",
    "data.paths": "dataset dataset_path train_data",
    "data.tokenizer": "tokenizer_path tokenizer_model",
    "checkpoint.save_interval": "save_steps save_every",
    "run_dir": "output_dir out_dir save save_dir",
    "resume": "load resume_from_checkpoint",
    "megatron-fp8 launch --ranks N train": "ranks nproc_per_node nproc num_processes",
}
"""Key or command -> its names (last parts) in transformers' Trainer, torchtitan and Megatron-LM's scripts."""
_KEY_OF_WORD = {word: key for key, words in OTHER_WORDS.items() for word in words.split()}


def nearest_key(given: str, known: Iterable[str]) -> str | None:
    """Returns the known dotted key most similar to ``given``, in any section; None if none is similar."""
    keys = (*known, "model.fp8_format")

    def likeness(key: str) -> tuple[bool, float]:
        """Returns whether the last parts are equal, and the similarity of the names, with or without sections."""
        section, _, last = key.rpartition(".")
        names = {f"{section}_{last}", last}
        return last == own_last, max(_ratio(one, name) for one in own_names for name in names)

    own_last = given.rpartition(".")[2]
    own_names = {given.replace(".", "_"), own_last}
    nearest = max(keys, key=likeness)
    same, ratio = likeness(nearest)
    if not same and ratio < 1 and own_last in _KEY_OF_WORD:
        nearest, ratio = _KEY_OF_WORD[own_last], 1
    if nearest == "model.fp8_format":
        nearest = NOT_A_KEY
    return nearest if same or ratio >= 0.6 else None


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()

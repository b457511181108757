"""Checks of a `TransformerConfig`: rules of fields, FP8 settings, and settings that exclude each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.transformer.transformer_config import MLATransformerConfig as MegatronLatentConfig
from megatron.core.transformer.transformer_config import TransformerConfig as MegatronConfig

from ...backends.transformer_engine import name as TE
from ...backends.transformer_engine import unsupported_part
from ...files.terminal import warn_user
from ...fp8_utils import NVFP4_AS_FP8, get_fp8_recipe, quantizes, recipe_name_of, recipe_setting
from ...numerics.formats import ROLES
from ...numerics.rule import Rule
from ...plan.overrides import Override, check_overrides, check_parts
from ...plan.settings import DEFAULT_RECIPE, FP4_OPTIONS, has_setting, import_factory
from ...plan.site_plan import has_token_scales, scale_group
from ...recipe import RECIPES
from .fields import FIELD_RULES, OWN_RULES, REFUSED, RELATIONS, SILENT
from .rules import check, check_relation, format_value, integer

if TYPE_CHECKING:
    from .transformer_config import TransformerConfig

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")  # their default, 0, is invalid


def default_of(field: Any) -> Any:
    """Returns a dataclass field's default; calls its factory if it has one."""
    has_factory = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if has_factory else field.default


DEFAULTS: dict[str, Any] = {
    field.name: default_of(field)
    for field in (*dataclasses.fields(MegatronLatentConfig), *dataclasses.fields(MegatronConfig))
}
"""Defaults of both of Megatron-Core's configs; where they differ, of the one without latent attention."""
LATENT_FIELDS = frozenset(DEFAULTS) - {field.name for field in dataclasses.fields(MegatronConfig)}
"""Fields that only Megatron-Core's config of latent attention has."""


def check_fields(config: Any, before: str = "") -> None:
    """Raises ValueError for a field that is out of range, in conflict with another, or unavailable here.

    Args:
        config: any object with Megatron-Core's fields as attributes.
        before: prefix of names in messages, such as 'model.'.
    """
    for name in _NEEDED:
        check(f"{before}{name}", getattr(config, name), FIELD_RULES[name], "give it")
    for name in (*FIELD_RULES, *REFUSED):
        default = DEFAULTS[name]
        value = getattr(config, name, default)
        if value is default or (type(value) is type(default) and value == default):
            continue
        if name in FIELD_RULES:
            # Left out, fp8_recipe is DEFAULT_RECIPE, which is not Megatron-Core's default.
            left = "out" if name == "fp8_recipe" else format_value(default)
            check(f"{before}{name}", value, FIELD_RULES[name], f"change it, or leave it {left}")
        if name in REFUSED:
            raise ValueError(
                f"{before}{name}={format_value(value)} is not available in this version: {REFUSED[name]}. Leave it"
                f" {format_value(default)}."
            )
    for relation in RELATIONS:
        check_relation(config, relation, before)


def check_fp8_settings(config: TransformerConfig) -> None:
    """Normalises names to plain strings and checks every FP8 setting of `config`; ValueError for an invalid one.

    With FP8 off, Megatron-Core's own fields may have any value that it accepts, and settings without effect give a
    warning.
    """
    for name, rule in OWN_RULES.items():
        check(name, getattr(config, name), rule)
    config.fp8, config.fp4 = config.fp8 or None, config.fp4 or None  # False, as in other libraries
    if config.fp8 and config.fp4:
        raise ValueError(
            f"fp8={plain(config.fp8)!r} and fp4={plain(config.fp4)!r}: linears have one recipe. Set one of them to None"
            " (--model.fp8=null);"
            " in an FP4 model fp8_overrides names FP8 recipes for layers, GEMMs or operands, and 'nvfp4' in an FP8 model."
        )
    warmup, healing = (getattr(config, name) for name in _PHASES)
    if warmup + healing >= 1:
        raise ValueError(
            f"fp8_high_precision_warmup={warmup!r} and fp8_high_precision_healing={healing!r} leave nothing to FP8: their"
            " sum must be below 1. Lower one of them, or set fp8=None to train in BF16."
        )
    check_overrides(config.fp8_overrides, "fp8_overrides")
    if config.fp8_high_precision_healing_parts is not None:
        check_parts(config.fp8_high_precision_healing_parts, "fp8_high_precision_healing_parts")
    if config.fp4_param and not config.fp4:
        raise ValueError(
            f"fp4_param=True needs FP4 training, and fp4 is {config.fp4!r}. Set fp4='e2m1', or drop it."
        )
    if config.fp8_param and not config.fp8:
        raise ValueError(
            f"fp8_param=True needs FP8 training, and fp8 is {config.fp8!r}. Set fp8='hybrid' or 'e4m3', or drop it."
        )
    if quantizes(config):
        config.fp8, config.fp8_recipe = plain(config.fp8), plain(config.fp8_recipe or DEFAULT_RECIPE)
        config.fp4, config.fp4_recipe = plain(config.fp4), plain(config.fp4_recipe)
        check_fields(config)
        if config.fp8 and config.fp8_recipe == "nvfp4":
            raise ValueError(NVFP4_AS_FP8)
        if config.fp4 and "fp8" in config.fp8_overrides.values():
            raise ValueError(
                f"fp8_overrides={config.fp8_overrides!r}: 'fp8' is the recipe of all linears, and theirs is of FP4. Name"
                f" it ({config.fp4_recipe!r}), or an FP8 recipe, such as 'mxfp8'."
            )
        _check_bf16_layers(config)
        _check_factory(config)
        check_incompatible(config)
        _check_pow2(config)
        _check_margin(config)


def announce_settings(config: TransformerConfig) -> None:
    """Warns of settings without effect, and with FP8 off of relations that Megatron-Core violates silently."""
    if not quantizes(config):
        for relation in SILENT:
            if not relation.holds(config):
                warn_user(relation.words)
    _warn_without_effect(config)


def plain(value: Any) -> Any:
    """Returns the value of an enum's member; any other value itself."""
    return value.value if isinstance(value, Enum) else value


_PHASES = ("fp8_high_precision_warmup", "fp8_high_precision_healing")


def _check_bf16_layers(config: TransformerConfig) -> None:
    """Checks the counts of layers, which refer to the whole model, by global layer index, in any pipeline layout."""
    if not config.first_last_layers_bf16:
        return
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        rule = integer(0, config.num_layers, "layers, the model's num_layers")
        check(name, getattr(config, name), rule, "change it, or set first_last_layers_bf16=False")
    start, end = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    put_back = any(target != "bf16" for target in config.fp8_overrides.values())
    if start + end > config.num_layers or (start + end == config.num_layers and not put_back):
        raise ValueError(
            "first_last_layers_bf16=True keeps the first and last layers in BF16, and"
            f" num_layers_at_start_in_bf16={start} and num_layers_at_end_in_bf16={end} leave none of"
            f" num_layers={config.num_layers} in FP8: set"
            " first_last_layers_bf16=False, lower one of the two numbers, or set fp8=None to train in BF16."
        )


def _check_factory(config: TransformerConfig) -> None:
    setting = recipe_setting(config)
    field = setting.replace("recipe", "quantizer_factory")
    path = getattr(config, field)
    names_custom = "custom" in (recipe_name_of(config), *config.fp8_overrides.values())
    if not names_custom:
        if path is not None:
            raise ValueError(
                f"{field}={path!r} is used only by {setting}='custom', and {setting} is "
                f"{recipe_name_of(config)!r}: set {setting}='custom' or drop the factory."
            )
        return
    import_factory(path, field)


def _check_pow2(config: TransformerConfig) -> None:
    pow2, name = config.fp8_pow2_scales, config.fp8_recipe
    if pow2 is None or name == "custom" or config.fp4:
        return
    rules = [get_fp8_recipe(config).rule(role) for role in ROLES]
    fp32 = any(rule is not None and rule.scale == "fp32" for rule in rules)
    if pow2 is False and not fp32:
        raise ValueError(
            f"fp8_pow2_scales=False with fp8_recipe={name!r}: its scales are powers of two by definition. "
            "Leave it None, or use tensorwise or blockwise."
        )
    if pow2 is True and fp32:
        raise ValueError(
            f"fp8_pow2_scales=True with fp8_recipe={name!r}: its scales are float32. Leave it None, or use tensorwise,"
            " whose scales can be powers of two."
        )


def _check_margin(config: TransformerConfig) -> None:
    """Refuses a margin for row and block scales, which keep no headroom, before the model is built."""
    names = {recipe_name_of(config), *config.fp8_overrides.values()} & set(RECIPES)
    for name in names if config.fp8_margin else ():
        get_fp8_recipe(config, name)


def _warn_without_effect(config: TransformerConfig) -> None:
    """Warns of settings that another setting switches off."""
    default = {f.name: f.default for f in dataclasses.fields(config)}

    def is_set(name: str) -> bool:
        return getattr(config, name) != default[name]

    if quantizes(config) and not config.first_last_layers_bf16:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if is_set(name):
                warn_user(f"{name}={getattr(config, name)!r} has no effect with first_last_layers_bf16=False")
    if is_set("fp8_high_precision_healing_parts") and not config.fp8_high_precision_healing:
        parts = config.fp8_high_precision_healing_parts
        warn_user(
            f"fp8_high_precision_healing_parts={parts!r} has no effect with fp8_high_precision_healing=0"
        )
    if is_set("fp8_guard_patience") and not config.fp8_guard:
        warn_user(f"fp8_guard_patience={config.fp8_guard_patience!r} has no effect with fp8_guard=False")
    recipes = {recipe_name_of(config), *config.fp8_overrides.values()} & set(RECIPES)
    if not quantizes(config) or "nvfp4" not in recipes:
        for name in map("fp4_{}".format, FP4_OPTIONS):
            if is_set(name):
                warn_user(f"{name}={getattr(config, name)!r} has no effect without the recipe nvfp4")
    for switch in ("fp8", "fp4"):
        for name in (f"{switch}_recipe", f"{switch}_quantizer_factory"):
            if quantizes(config) and not getattr(config, switch) and is_set(name):
                warn_user(f"{name}={getattr(config, name)!r} has no effect because {switch} is None")
    if not quantizes(config):
        for name in (
            "fp8_recipe",
            "fp8_backend",
            "fp8_stochastic_rounding",
            "fp8_size_filter",
            "fp8_fast_accumulation",
            "fp8_guard",
            "fp8_output_layer",
            "moe_fp8_dispatch",
            *_PHASES,
            "fp8_high_precision_healing_parts",
        ):
            if is_set(name):
                warn_user(
                    f"{name}={getattr(config, name)!r} has no effect because fp8 is None (training in BF16)"
                )
        return
    if config.moe_fp8_dispatch and not config.num_moe_experts:
        warn_user("moe_fp8_dispatch=True has no effect without num_moe_experts")
    for name, field in _OF_SOME_RECIPES.items():
        if is_set(name) and not any(has_setting(recipe, field) for recipe in recipes):
            warn_user(
                f"{name}={getattr(config, name)!r} has no effect with {recipe_setting(config)}={recipe_name_of(config)!r}"
            )
    if recipes <= {"custom", "nvfp4"} and is_set("fp8_pow2_scales"):
        warn_user(
            f"fp8_pow2_scales={config.fp8_pow2_scales!r} has no effect with"
            f" {recipe_setting(config)}={recipe_name_of(config)!r}"
        )


_OF_SOME_RECIPES = {
    "fp8_interval": "interval",
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
    "fp8_amax_epsilon": "amax_epsilon",
    "fp8_stochastic_rounding": "stochastic_rounding",
    "tp_only_amax_red": "amax_history_len",  # only histories use reduced amaxes
}
"""Setting -> the field of a recipe that reads it."""


class _Other(NamedTuple):
    """A setting whose value is refused beside another setting."""

    name: str
    why: str
    remedy: str = "False"
    is_refused: Callable[[Any], bool] = bool


def _is_false(value: Any) -> bool:
    return not value


_WARMUP, _HEALING = "fp8_high_precision_warmup", "fp8_high_precision_healing"

# Setting -> (its value without effect, what it excludes). For recipes see the functions below.
_EXCLUDES: dict[str, tuple[str, tuple[_Other, ...]]] = {
    "moe_fp8_dispatch": ("False", (
        _Other("moe_token_dispatcher_type", "kernels of its own (DeepEP, HybridEP) send the tokens",
               "'alltoall' or 'allgather'", lambda value: value == "flex"),
        _Other("fp8_wgrad", "weight gradients in high precision read values that were never quantized, and only codes"
               " arrive", "True", _is_false),
        _Other("moe_shared_expert_overlap", "the dispatcher would pass codes to shared experts, which read values"),
        _Other("moe_apply_probs_on_input", "tokens that arrive as codes are not multiplied"),
        _Other("moe_permute_fusion", "Transformer Engine's permutation does not move codes"),
        _Other("moe_latent_size", "the latent projection is no linear of this package", "None"),
        _Other("add_bias_linear", "the gradient of the experts' biases is a sum of values, and only codes arrive"),
    )),
    "fp8_guard": ("False", (
        _Other("fp8_param", "a site that moves to BF16 needs a BF16 weight, and fp8_param keeps it in FP8"),
        _Other("fp4_param", "a site that moves to BF16 needs a BF16 weight, and fp4_param keeps it in FP4"),
        _Other("tp_only_amax_red", "data-parallel ranks have their own amaxes, and would move different sites"),
    )),
    "fp8_size_filter": ("None", (_Other("fp8_wgrad", "its times are of three GEMMs in FP8", "True", _is_false),)),
    "fp8_output_layer": ("False", (
        _Other("defer_embedding_wgrad_compute", "Megatron-Core computes the deferred gradient of the output layer's"
               " weight in BF16"),
    )),
    **dict.fromkeys(("fp8_param", "fp4_param"), ("False", (
        _Other(_WARMUP, "a phase in BF16 needs BF16 weights", "0"),
        _Other(_HEALING, "a phase in BF16 needs BF16 weights", "0"),
    ))),
    "fp8_backend": ("'native'", (
        _Other("fp8_wgrad", "its linears have no weight gradient in BF16", "True", _is_false),
        _Other("fp8_param", "FP8 weights are this package's own"),
        _Other("fp4_param", "FP4 weights are this package's own"),
        _Other("fp8_size_filter", "its table is of this package's GEMMs", "None"),
        _Other("fp8_fast_accumulation", "its recipes say how each product accumulates", "'fprop'",
               lambda value: value != "fprop"),
        _Other(_WARMUP, "phases in BF16 are this package's", "0"),
        _Other(_HEALING, "phases in BF16 are this package's", "0"),
        _Other("fp8_output_layer", "the output projection is none of its layers"),
        _Other("fp8_guard", "it does not expose the amaxes that the guard needs"),
        _Other("num_moe_experts", "it shares amaxes between ranks that hold different experts", "None"),
    )),
}  # fmt: skip


def check_incompatible(config: Any) -> None:
    """Raises ValueError for settings of an FP8 config that exclude each other."""
    for setting, (off, others) in _EXCLUDES.items():
        value = getattr(config, setting)
        if not _has_effect(setting, value, config):
            continue
        for other in others:
            found = getattr(config, other.name)
            if other.is_refused(found):
                raise ValueError(
                    f"{setting}={value!r} with {other.name}={found!r}: {other.why}. Set {other.name}={other.remedy}, or"
                    f" {setting}={off}."
                )
    if _has_effect("moe_fp8_dispatch", config.moe_fp8_dispatch, config):
        _check_dispatched(config)
    if wants_te(config):
        _check_te_recipe(config)


def _has_effect(setting: str, value: Any, config: Any) -> bool:
    if setting == "fp8_backend":
        return wants_te(config)
    return bool(value) and (setting != "moe_fp8_dispatch" or bool(config.num_moe_experts))


def _check_dispatched(config: Any) -> None:
    recipe, named = get_fp8_recipe(config), f"{recipe_setting(config)}={recipe_name_of(config)!r}"
    for role in ("input", "grad_output"):
        rule: Rule | None = recipe.rule(role)
        if rule is None:
            raise ValueError(
                f"moe_fp8_dispatch=True with {named}, which leaves {role} in high precision:"
                " there are no codes to send. Quantize it, or set moe_fp8_dispatch=False."
            )
        if not has_token_scales(rule):
            raise ValueError(
                f"moe_fp8_dispatch=True with {named}: it has one scale per"
                f" {scale_group(rule)}, and an expert's tokens come from many ranks, each with another. Set"
                f"{' fp4=None, fp8 and' if config.fp4 else ''} fp8_recipe to"
                " 'blockwise', 'mxfp8' or 'rowwise', whose scales travel with a token, or moe_fp8_dispatch=False."
            )


def wants_te(config: Any) -> bool:
    """Whether this config requests Transformer Engine's layers for what is quantized."""
    return quantizes(config) and getattr(config, "fp8_backend", None) == TE


def _check_te_recipe(config: Any) -> None:
    for glob, target in config.fp8_overrides.items():
        if target != "bf16" or Override.of(glob, target).part:
            raise ValueError(
                f"fp8_overrides[{glob!r}]={target!r} cannot be had from fp8_backend={TE!r}: its context has one recipe"
                " for all layers. Override whole layers with 'bf16', or use fp8_backend='native'"
            )
    reason = unsupported_part(get_fp8_recipe(config))
    if reason is not None:
        other = "leave it out" if config.fp4 else "use fp8_backend='native', or drop the setting"
        raise ValueError(f"fp8_backend={TE!r}: {reason}; {other}")

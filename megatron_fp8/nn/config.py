"""Fp8Config: all FP8 settings of a PyTorch model, checked at construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ..numerics.formats import Format
from ..numerics.rule import short_repr
from ..plan.overrides import check_overrides
from ..plan.resolve import SiteRequest, named_recipes
from ..plan.settings import RecipeSettings, from_settings, has_setting
from ..recipe import RECIPES, CustomRecipe, Recipe, check_recipe_name, recipe_name
from ..state.fp8_state import FAST_ACCUMULATION

Skip = str | Callable[[str, Any], bool]
"""A glob of module names, or a function (name, module) -> whether a linear stays in high precision."""

DEFAULT_SKIP: tuple[Skip, ...] = ("*embed*", "*final*norm*", "ln_f", "lm_head", "output_layer", "embed_out")
"""Default skip list: embeddings, the final norm and the output projection."""

GRANULARITIES = {
    "tensor": "tensorwise",
    "channel": "rowwise",
    "row": "rowwise",
    "block": "blockwise",
    "mx": "mxfp8",
}
"""Granularity of scales -> recipe."""

_OF_A_LINEAR = (
    "overrides",
    "size_filter",
    "size_filter_tokens",
    "fast_accumulation",
    "keep_columnwise",
    "backend",
)


@dataclass(frozen=True, repr=False)
class Fp8Config:
    """FP8 settings for the linears of a model.

    Args:
        recipe: a name in megatron_fp8.recipe.RECIPES ('tensorwise' by default), or an instance of one of its
            classes, which has its own formats, margin and epsilon.
        granularity: selects the recipe by granularity of scales: 'tensor', 'channel' (or 'row'), 'block'
            (128x128, 1x128) or 'mx' (1x32). Use instead of ``recipe``.
        forward_format: 'e4m3', for weights and activations.
        backward_format: 'e4m3' or 'e5m2', for gradients; None: the recipe's default, E5M2 for delayed and
            tensorwise.
        quantize_weights, quantize_activations, quantize_gradients: whether to quantize that operand. A GEMM
            with an unquantized operand runs in high precision, with the other operand dequantized.
        margin: powers of two of headroom below the largest code; per-tensor scales only.
        epsilon: lower limit of the amax (0: off).
        skip: globs of module names and predicates (name, module) -> bool; matching modules stay in high
            precision.
        overrides: exceptions by name; the last match wins. A glob of names, or of their last parts,
            optionally followed by ':fprop', ':dgrad', ':wgrad', ':input', ':weight' or ':grad_output' ->
            'bf16' (the model's own dtype), 'fp8', a recipe by name or as an instance, or a format ('e4m3',
            'e5m2', 'hybrid').
        min_features: linears with fewer input or output features stay in high precision; tensor cores
            multiply 16 at a time.
        size_filter: a table from ``megatron-fp8 bench --tune``; GEMMs stay in high precision if FP8 does not
            pay.
        size_filter_tokens: tokens per microbatch, if the table has several counts.
        fast_accumulation: the GEMMs whose partial sums tensor cores may keep at their own precision: 'fprop', 'all'
            or 'none'. H100 and H200 keep about 14 bits then, and are faster; block scales never do.
        keep_columnwise: whether to store the weights' codes for dgrad until backward, if they differ from the
            forward's. False: each backward recomputes them, with the same bits, and saves one byte per value
            in between.
        backend: 'auto', 'native', 'emulated', ...
        fallback: 'error', or 'warn': linears that cannot run as configured stay in high precision, and this
            is printed and reported.

    Raises:
        ValueError: a value is unknown, two contradict each other, or nothing would be quantized.
    """

    recipe: Recipe | str | None = None
    granularity: str | None = None
    forward_format: str = "e4m3"
    backward_format: str | None = None
    quantize_weights: bool = True
    quantize_activations: bool = True
    quantize_gradients: bool = True
    margin: int = 0
    epsilon: float = 0.0
    skip: tuple[Skip, ...] = DEFAULT_SKIP
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    min_features: int = 16
    size_filter: str | None = None
    size_filter_tokens: int | None = None
    fast_accumulation: Literal["fprop", "all", "none"] = "fprop"
    keep_columnwise: bool = True
    backend: str = "auto"
    fallback: Literal["error", "warn"] = "error"

    def __repr__(self) -> str:
        return short_repr(self)

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", as_skip(self.skip))
        if self.forward_format != "e4m3":
            raise ValueError(
                f"forward_format={self.forward_format!r}: weights and activations are 'e4m3'; no hardware multiplies E5M2"
                " by E5M2, and E5M2 has a bit of precision less"
            )
        if self.backward_format not in (None, "e4m3", "e5m2"):
            raise ValueError(f"backward_format={self.backward_format!r}: use 'e5m2', 'e4m3' or None")
        if self.fallback not in ("error", "warn"):
            raise ValueError(f"fallback={self.fallback!r}: use 'error' or 'warn'")
        if self.fast_accumulation not in FAST_ACCUMULATION:
            raise ValueError(f"fast_accumulation={self.fast_accumulation!r}: use 'fprop', 'all' or 'none'")
        if (
            isinstance(self.min_features, bool)
            or not isinstance(self.min_features, int)
            or self.min_features < 1
        ):
            raise ValueError(f"min_features={self.min_features!r}: a whole number >= 1 is needed")
        for name in ("quantize_weights", "quantize_activations", "quantize_gradients", "keep_columnwise"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: use True or False")
        if len(self.unquantized) > 1:
            raise ValueError(
                f"{' and '.join(self.unquantized)} not quantized: every GEMM needs two quantized operands to run in FP8,"
                " and none is left; quantize at least two of weights, activations and gradients"
            )
        self._resolve()
        check_overrides(self.overrides, "overrides")
        object.__setattr__(self, "overrides", dict(self.overrides))
        for key, value in self.overrides.items():
            if value in RECIPES:
                self._named(value, f"overrides[{key!r}]")

    @cached_property
    def resolved_recipe(self) -> Recipe:
        """The recipe as an instance; cached, because every linear reads it."""
        return self._resolve()

    @property
    def unquantized(self) -> tuple[str, ...]:
        """Roles that stay in high precision."""
        flags = {
            "weight": self.quantize_weights,
            "input": self.quantize_activations,
            "grad_output": self.quantize_gradients,
        }
        return tuple(role for role, quantized in flags.items() if not quantized)

    def request(self, recipe: Recipe | None = None) -> SiteRequest:
        """The request for a site plan. ``recipe``, from fp8_autocast, replaces the config's recipe."""
        overrides = {} if recipe else self.overrides
        return SiteRequest(
            recipe or self.resolved_recipe,
            named_recipes(overrides, self._named),
            reason="recipe of fp8_autocast" if recipe else "",
            overrides=overrides,
            unquantized=self.unquantized,
            backend=self.backend,
            warn=self.fallback == "warn",
        )

    def differences(self, other: Fp8Config) -> dict[str, tuple[Any, Any]]:
        """Settings that would make a linear run differently: name -> (this config's value, the other's)."""
        recipes = self.resolved_recipe, other.resolved_recipe
        names = recipe_name(recipes[0]), recipe_name(recipes[1])
        texts = {
            "recipe": recipes if names[0] == names[1] else names,
            "not quantized": (self.unquantized, other.unquantized),
            **{name: (getattr(self, name), getattr(other, name)) for name in _OF_A_LINEAR},
        }
        return {
            name: (own_value, other_value)
            for name, (own_value, other_value) in texts.items()
            if own_value != other_value
        }

    def with_recipe(self, recipe: Recipe | str) -> Fp8Config:
        """A copy with another recipe; a recipe instance brings its own formats, margin and epsilon."""
        if isinstance(recipe, str):
            return replace(self, recipe=recipe, granularity=None, margin=0, epsilon=0.0)
        return replace(self, recipe=recipe, granularity=None, backward_format=None, margin=0, epsilon=0.0)

    def _resolve(self) -> Recipe:
        if self.recipe is not None and self.granularity is not None:
            raise ValueError(
                f"recipe={self.recipe!r} and granularity={self.granularity!r} say the same thing twice: give one of them"
            )
        if self.granularity is not None and self.granularity not in GRANULARITIES:
            raise ValueError(
                f"granularity={self.granularity!r} is unknown: use one of {', '.join(map(repr, GRANULARITIES))}"
            )
        if self.recipe is not None and not isinstance(self.recipe, str):
            self._refuse_beside_instance()
            return self.recipe
        name = self.recipe or GRANULARITIES.get(self.granularity or "tensor", "tensorwise")
        return self._named(name)

    def _named(self, name: str, where: str = "recipe") -> Recipe:
        """Builds the named recipe with this config's options."""
        if check_recipe_name(name) == "custom":
            raise ValueError(
                f"{where}='custom' has no meaning by itself: give megatron_fp8.recipe.CustomRecipe(function of the role)"
            )
        if self.epsilon and not has_setting(name, "amax_epsilon"):
            raise ValueError(f"epsilon={self.epsilon} does not exist for {name!r}: leave epsilon=0")
        if self.backward_format is not None and not has_setting(name, "fp8_format"):
            raise ValueError(
                f"backward_format={self.backward_format!r} does not exist for {name!r}, which has formats of its own:"
                " leave it out"
            )
        return from_settings(name, self._settings())

    def _settings(self) -> RecipeSettings:
        fp8_format = {"e5m2": Format.HYBRID, "e4m3": Format.E4M3, None: None}[self.backward_format]
        return RecipeSettings(fp8_format=fp8_format, margin=self.margin, amax_epsilon=self.epsilon)

    def _refuse_beside_instance(self) -> None:
        recipe_name(self.recipe)  # type: ignore[arg-type]
        options = {"backward_format": self.backward_format, "margin": self.margin, "epsilon": self.epsilon}
        twice = [f"{name}={value!r}" for name, value in options.items() if value]
        if twice:
            raise ValueError(
                f"recipe={self.recipe!r} is an instance with its own {', '.join(options)}: set them there, not"
                f" in {', '.join(twice)}"
            )
        if isinstance(self.recipe, CustomRecipe) and self.unquantized:
            raise ValueError(
                f"CustomRecipe decides for itself what is quantized: return None for {', '.join(self.unquantized)} there"
            )


def as_skip(skip: Any) -> tuple[Skip, ...]:
    """The skip list as a tuple: accepts one glob, one predicate or an iterable of them. Raises ValueError for anything
    else."""
    several = isinstance(skip, Iterable) and not isinstance(skip, str)
    entries = () if skip is None else tuple(skip) if several else (skip,)
    for entry in entries:
        if not (callable(entry) or (isinstance(entry, str) and entry)):
            raise ValueError(
                f"skip: {entry!r} is neither a glob of module names, such as 'layers.0.*', nor a function of"
                " (name, module)"
            )
    return entries


def make_config(recipe: Recipe | str | Fp8Config | None, config: Fp8Config | None) -> Fp8Config:
    """The config from either argument. Raises ValueError if both are given or a type is wrong."""
    if recipe is not None and config is not None:
        raise ValueError(
            f"recipe={recipe!r} and config={config!r} are both given: put the recipe into the config"
        )
    if isinstance(recipe, Fp8Config):
        return recipe
    if config is not None and not isinstance(config, Fp8Config):
        raise ValueError(f"config={config!r}: an Fp8Config is needed")
    return config or Fp8Config(recipe=recipe)

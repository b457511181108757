"""GEMM sites of a model chunk, and its FP8 weights, without building a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from types import SimpleNamespace

from ..fp8_utils import get_fp8_recipe, is_first_last_bf16_layer
from ..numerics.rule import Granularity, Rule
from ..plan.overrides import Override
from ..plan.resolve import SiteRequest, cast_specs, named_recipes
from ..plan.site_plan import SitePlan, bf16_site, planned_site
from ..recipe import RECIPES, Recipe
from .model import Model
from .settings import Settings

_DEFAULTS = {
    "fp8_margin": 0,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "fp8_quantizer_factory": None,
}
"""Megatron-Core's defaults of options that do not affect sizes."""


def recipe_of(model: Model) -> Callable[[str | None], Recipe]:
    """A function: recipe name -> recipe with the model's options; None -> the model's recipe."""
    options = {**_DEFAULTS, **model.fp8_options, "fp8": model.fp8, "fp8_recipe": model.fp8_recipe}
    fields = SimpleNamespace(**options)
    return cache(lambda name: get_fp8_recipe(fields, name))


OUTPUT = "output_layer"
"""The site of the output projection, outside the layers."""


class Plans:
    """The plans of a model's sites, by name."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._request: SiteRequest | None = None
        if model.fp8:
            recipe = recipe_of(model)
            self._request = SiteRequest(
                recipe(None),
                named_recipes(model.fp8_overrides, recipe),
                reason="fp8 recipe of the config",
                overrides=model.fp8_overrides,
                fp8_wgrad=model.fp8_wgrad,
                prefix="fp8_",
                dtype="BF16",
            )
        self._known: dict[str, SitePlan] = {}
        self._alike: dict[
            tuple[str, bool], SitePlan
        ] = {}  # keys: (name without its layer, layer stays in BF16)

    def of(self, name: str, layer: int | None) -> SitePlan:
        """The plan of a site. Raises ValueError if both operands of a GEMM would be E5M2."""
        if name not in self._known:
            self._known[name] = self._of(name, layer)
        return self._known[name]

    @property
    def output(self) -> SitePlan:
        """The plan of the output projection."""
        return self.of(OUTPUT, None)

    def _of(self, name: str, layer: int | None) -> SitePlan:
        if name == OUTPUT and not self._model.fp8_output_layer:
            return bf16_site(name, None, "fp8_output_layer is off")
        in_bf16 = layer is not None and is_first_last_bf16_layer(self._model, layer)
        if self._model.fp8_overrides:  # they may name layers
            return self._make(name, layer, in_bf16)
        key = name.replace(f".layers.{layer}.", ".", 1), in_bf16
        if key not in self._alike:
            self._alike[key] = self._make(name, layer, in_bf16)
        return self._alike[key].of(name, layer)

    def _make(self, name: str, layer: int | None, in_bf16: bool) -> SitePlan:
        if self._request is None:
            return bf16_site(name, layer, "fp8 is off")
        specs = cast_specs(self._request, name, "first_last_layers_bf16" if in_bf16 else None)
        if specs.none_in_fp8:
            return bf16_site(name, layer, "; ".join(specs.reasons))
        return planned_site(name, layer, "emulated", "; ".join(specs.reasons), specs)


def two_rules(plan: SitePlan, role: str, one: str, other: str) -> tuple[Rule | None, Rule | None]:
    """An operand's rules for the GEMM that reads its rowwise side, and for the other GEMM."""
    casts = (plan.operands[one][role], plan.operands[other][role])
    rowwise, columnwise = (None if cast is None else cast.rule for cast in casts)
    return rowwise, columnwise


def weight_rules(plan: SitePlan) -> tuple[Rule | None, Rule | None]:
    """The weight's rules for fprop and for dgrad."""
    return two_rules(plan, "weight", "fprop", "dgrad")


def reads(rule: Rule) -> int:
    """How often a cast reads its operand: twice if it needs the amax first, i.e. if a scale covers more than a
    block."""
    return 1 if rule.delayed or rule.granularity.cols else 2


def shares_gradient_buffer(settings: Settings) -> bool:
    """Whether BF16 weights are gathered through the gradient buffer (reuse_grad_buf_for_mxfp8_param_ag)."""
    share = settings.optimizer.reuse_grad_buf_for_mxfp8_param_ag
    if share is not None:
        return share
    return settings.optimizer.use_distributed_optimizer and travels_in_bf16(settings.model)


def travels_in_bf16(model: Model) -> bool:
    """Whether all FP8 weights need separate codes for each direction. Duplicates mcore/params.py, which imports
    Megatron-Core."""
    if not (model.fp8 and model.fp8_param):
        return False
    overrides = [Override.of(*entry) for entry in model.fp8_overrides.items()]
    names = {override.value for override in overrides if override.covers("weight")} & set(RECIPES)
    recipe = recipe_of(model)
    rules = [recipe(name).rule("weight") for name in (None, *sorted(names))]
    return all(rule is not None and not rule.granularity.symmetric for rule in rules)


def lives_as_fp8(settings: Settings, plan: SitePlan) -> bool:
    """Whether this site's weight is an FP8 parameter."""
    if not (settings.model.fp8 and settings.model.fp8_param) or plan.precision == "bf16":
        return False
    if plan.name == OUTPUT:  # even if not tied to the embedding
        return False
    rowwise, _ = weight_rules(plan)
    if rowwise is None or plan.operands["fprop"]["weight"] != plan.operands["dgrad"]["weight"]:
        return False
    if rowwise.granularity.symmetric:
        return True
    return not settings.optimizer.use_distributed_optimizer or shares_gradient_buffer(settings)


@dataclass(frozen=True)
class StoredWeight:
    """Bytes of a quantised matrix.

    Attributes:
        codes: one byte per value and direction.
        scales: scale_inv of all directions.
    """

    codes: int = 0
    scales: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return self.codes + self.scales


@lru_cache(maxsize=4096)
def side_scales(rule: Rule, rows: int, cols: int) -> int:
    """Bytes of the scales for one direction of a matrix [rows, cols] whose blocks run along the columns."""
    granularity: Granularity = rule.granularity
    if granularity.is_tensor:
        return 4
    height = granularity.rows or rows
    width = granularity.cols or cols
    return -(-rows // height) * -(-cols // width) * (1 if rule.scale == "e8m0" else 4)


def stored_weight(
    plan: SitePlan, n: int, k: int, *, both_contiguous: bool = False, keeps_columnwise: bool = True
) -> StoredWeight:
    """Bytes of a quantised weight [n, k], for the directions that its GEMMs read.

    Args:
        both_contiguous: symmetric codes are stored twice, as tensor cores read them.
        keeps_columnwise: False: dgrad's own copy, if the same rule gives both, is recomputed in each
            backward.
    """
    rowwise, columnwise = weight_rules(plan)
    codes = scales = 0
    same = plan.operands["fprop"]["weight"] == plan.operands["dgrad"]["weight"]
    if rowwise is not None:
        codes, scales = n * k, side_scales(rowwise, n, k)
        if same and not keeps_columnwise:
            return StoredWeight(codes, scales)
        if same and rowwise.granularity.symmetric:
            return StoredWeight(codes * (2 if both_contiguous else 1), scales)
    if columnwise is not None:
        codes, scales = codes + n * k, scales + side_scales(columnwise, k, n)
    return StoredWeight(codes, scales)

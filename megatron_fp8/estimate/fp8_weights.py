"""Weights in FP8: rules, FP8 parameters, bytes of codes and scales."""

from __future__ import annotations

from functools import lru_cache

from ..fp8_utils import has_fp8_params
from ..numerics import nvfp4
from ..numerics.formats import E2M1
from ..numerics.rule import Rule
from ..plan.overrides import Override
from ..plan.site_plan import SitePlan
from ..recipe import RECIPES
from .config_reader import Settings
from .model import OUTPUT, Model, recipe_of


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
    return 1 if rule.delayed or (rule.granularity.cols and rule.fmt is not E2M1) else 2


def shares_gradient_buffer(settings: Settings) -> bool:
    """Whether BF16 weights are gathered through the gradient buffer (reuse_grad_buf_for_mxfp8_param_ag)."""
    share = settings.optimizer.reuse_grad_buf_for_mxfp8_param_ag
    if share is not None:
        return share
    return settings.optimizer.use_distributed_optimizer and _gathered_in_bf16(settings.model)


def _gathered_in_bf16(model: Model) -> bool:
    """Whether all FP8 weights need separate codes for each direction. Duplicates mcore/params.py, which imports
    Megatron-Core."""
    if not has_fp8_params(model) or model.fp4:
        return has_fp8_params(model)
    overrides = [Override.of(*entry) for entry in model.fp8_overrides.items()]
    names = {override.value for override in overrides if override.covers("weight")} & set(RECIPES) - {"nvfp4"}
    recipe = recipe_of(model)
    rules = [recipe(name).rule("weight") for name in (None, *sorted(names))]
    return all(rule is not None and not rule.granularity.symmetric for rule in rules)


def is_fp8_parameter(settings: Settings, plan: SitePlan) -> bool:
    """Whether this site's weight is an FP8 parameter."""
    if not has_fp8_params(settings.model) or plan.precision == "bf16":
        return False
    if plan.name == OUTPUT:  # even if not tied to the embedding
        return False
    rowwise, _ = weight_rules(plan)
    if (
        rowwise is None
        or (rowwise.fmt is E2M1) != bool(settings.model.fp4)
        or plan.operands["fprop"]["weight"] != plan.operands["dgrad"]["weight"]
    ):
        return False
    if rowwise.granularity.symmetric and not settings.model.fp4:
        return True
    return not settings.optimizer.use_distributed_optimizer or shares_gradient_buffer(settings)


def side_codes(rule: Rule, rows: int, cols: int) -> int:
    """Bytes of the codes for one direction of a matrix [rows, cols]: NVFP4 has two a byte, in whole blocks."""
    return rows * (nvfp4.padded_cols(cols) // 2 if rule.fmt is E2M1 else cols)


def side_bytes(rule: Rule, rows: int, cols: int) -> int:
    """Bytes of codes and scales for one direction of a matrix [rows, cols]."""
    return side_codes(rule, rows, cols) + side_scales(rule, rows, cols)


@lru_cache(maxsize=4096)
def side_scales(rule: Rule, rows: int, cols: int) -> int:
    """Bytes of the scales for one direction of a matrix [rows, cols] whose blocks run along the columns."""
    granularity = rule.granularity
    if granularity.is_tensor:
        return 4
    height, width = granularity.rows or rows, granularity.cols or cols
    return -(-rows // height) * -(-cols // width) * (4 if rule.scale in ("fp32", "pow2") else 1)


def stored_weight(
    plan: SitePlan, n: int, k: int, *, both_contiguous: bool = False, keeps_columnwise: bool = True
) -> int:
    """Bytes of the codes and scales of a weight [n, k], for the directions that its GEMMs read.

    Args:
        both_contiguous: symmetric codes are stored twice, as tensor cores read them.
        keeps_columnwise: False: dgrad's own copy, if the same rule gives both, is recomputed in each
            backward.
    """
    rowwise, columnwise = weight_rules(plan)
    total = 0
    if rowwise is not None:
        total = side_bytes(rowwise, n, k)
        if plan.operands["fprop"]["weight"] == plan.operands["dgrad"]["weight"]:
            if not keeps_columnwise:
                return total
            if rowwise.fmt is E2M1 and rowwise.granularity.symmetric:  # packed along its contraction: copies
                return total + side_bytes(rowwise, k, n)
            if rowwise.granularity.symmetric:
                return total + n * k * both_contiguous
    if columnwise is not None:
        total += side_bytes(columnwise, k, n)
    return total

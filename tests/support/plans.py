"""A plan by GEMM, and the rules by which this package casts its operands."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_fp8.diagnosis.format_costs import overrides_of
from megatron_fp8.numerics.rule import Rule
from megatron_fp8.plan.cast_spec import READERS
from megatron_fp8.plan.resolve import SiteRequest, named_recipes, resolve
from megatron_fp8.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)  # fmt: skip

Rules = dict[str, dict[str, Rule | None]]
"""GEMM -> role -> the rule by which its operand is cast."""

LAYER = "decoder.layers.{}.mlp.linear_fc1"
GEMMS = ("fprop", "dgrad", "wgrad")
RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "tensorwise": Float8CurrentScaling(use_power_2_scales=True),
    "blockwise": Float8BlockScaling(fp8_format="hybrid"),
}
TRIPLES = (
    "nvfp4 nvfp4 nvfp4", "mxfp8 mxfp8 mxfp8", "bf16 bf16 bf16", "nvfp4 bf16 mxfp8", "bf16 nvfp4 bf16",
    "mxfp8 mxfp8 nvfp4", "tensorwise tensorwise tensorwise", "blockwise blockwise blockwise",
    "bf16 tensorwise blockwise",
)  # fmt: skip
PLAN = {
    LAYER.format(layer): dict(zip(GEMMS, triple.split(), strict=True)) for layer, triple in enumerate(TRIPLES)
}
OTHER = "decoder.layers.99.mlp.linear_fc2"


def planned(site: str) -> Rules:
    """The rules of this package's own plan with the overrides, as ``rules_of`` gives a factory's."""
    overrides = overrides_of(PLAN)
    request = SiteRequest(
        DelayedScaling(), named_recipes(overrides, RECIPES.__getitem__), overrides=overrides
    )
    plan = resolve(request, site, None, torch.device("cpu"))
    found: Rules = {gemm: {} for gemm in GEMMS}
    for role, readers in READERS.items():
        for gemm, columnwise in zip(readers, (False, True), strict=True):
            cast = plan.operands[gemm][role]
            rule = None if cast is None else cast.rule
            rowwise = rule is not None and not columnwise
            found[gemm][role] = replace(rule, hadamard=False) if rule is not None and rowwise else rule
    return found

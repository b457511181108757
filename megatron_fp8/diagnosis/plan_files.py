"""A plan of formats by GEMM as files: overrides, Megatron-Core's quantization recipe, Transformer Engine's factories.

Megatron-Core's file (megatron/core/quantization) gives each linear a recipe by a glob over its name. The Python file has
quantizer factories for Transformer Engine's ``CustomRecipe``: ``qfactory`` for a whole model, by the names of its
linears, and one for each combination of formats, which Megatron-Core's file names.

Transformer Engine has one quantizer for each operand of a linear. Its two directions are read by different GEMMs, so a
HybridQuantizer of two gives each GEMM its format, and an IdentityQuantizer is high precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..backends.transformer_engine import unsupported_part
from ..numerics.formats import E2M1
from ..numerics.rule import BLOCK_1X32, Rule
from ..recipe import GEMM_OPERANDS, NVFP4BlockScaling, Recipe
from .format_costs import HIGH_PRECISION, FormatPlan, Plan

TE_VERSION = "2.20"
"""The oldest Transformer Engine known to have HybridQuantizer and IdentityQuantizer."""

Recipes = Mapping[str, Recipe]
"""Format -> its recipe, with the run's options."""


def overrides_yaml(found: FormatPlan, own: Mapping[str, Any]) -> str:
    """The plan's overrides after the run's own, with a comment on what they cost."""
    import yaml

    head = f"# By megatron-fp8 diagnose --formats: costs {found.whole:.2g} of the loss at this checkpoint.\n"
    return head + yaml.safe_dump({**own, **found.overrides}, sort_keys=False, width=1000)


def te_refusal(recipes: Recipes) -> str | None:
    """Why Transformer Engine has no quantizer for one of these recipes; None if it has them all."""
    reasons = (
        unsupported_part(recipe) for recipe in recipes.values() if not isinstance(recipe, NVFP4BlockScaling)
    )
    return next((reason for reason in reasons if reason is not None), None)


# ------------------------------------------------------------------------------------------------------ Megatron-Core

_MEGATRON_HEAD = """\
# Precision by linear for Megatron-Core (quant_recipe; Megatron-LM: --te-precision-config-file), by megatron-fp8 diagnose.
# {module}.py must be importable where custom_recipe_factory names it, with Transformer Engine {version}. Layers count
# from 0 on each pipeline stage there, and from the model's first one here. Not run: no Blackwell GPU was at hand.
"""


def megatron_yaml(plan: Plan, recipes: Recipes, module: str) -> str:
    """Megatron-Core's quantization recipe. ``module``: the name under which the Python file is imported."""
    import yaml

    others = factory_name(dict.fromkeys(GEMM_OPERANDS, HIGH_PRECISION))
    configs = {others: _config({})}
    matchers = {}
    for site, gemms in plan.items():
        key = factory_name(gemms)
        configs[key] = _config(_training_recipe(gemms, recipes, f"{module}.{key}"))
        matchers[site] = _matcher(site, key)
    matchers["all others"] = _matcher("*", others)
    content = {"configs": configs, "matchers": matchers}
    return _MEGATRON_HEAD.format(module=module, version=TE_VERSION) + yaml.safe_dump(
        content, sort_keys=False, width=1000
    )


def factory_name(gemms: Mapping[str, str]) -> str:
    """Name of a combination's configuration and factory: 'nvfp4_nvfp4_bf16' for fprop, dgrad and wgrad."""
    return "_".join(gemms[gemm] for gemm in GEMM_OPERANDS)


def _config(training_recipe: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "transformer_engine_config_type": "TEQuantizationParams",
        "training_recipe": dict(training_recipe),
    }


def _matcher(pattern: str, config: str) -> dict[str, Any]:
    return {"config": config, "type": "glob", "pattern": pattern, "enabled": True}


def _training_recipe(gemms: Mapping[str, str], recipes: Recipes, factory: str) -> dict[str, Any]:
    """Megatron-Core's own name of a recipe if its defaults are the same, else the factory."""
    always = {"override_nonquantized_autocast": True}
    formats = set(gemms.values())
    if formats == {HIGH_PRECISION}:
        return {}
    fmt = next(iter(formats))
    if len(formats) == 1:
        recipe: Any = recipes[fmt]
        if recipe == NVFP4BlockScaling():
            return {"fp4_quantization_recipe": fmt, **always}
        if not isinstance(recipe, NVFP4BlockScaling) and recipe == type(recipe)(fp8_format=recipe.fp8_format):
            return {"fp8_quantization_recipe": fmt, "fp8_format": recipe.fp8_format.value, **always}
    return {"fp8_quantization_recipe": "custom", "custom_recipe_factory": factory, **always}


# -------------------------------------------------------------------------------------------------- Transformer Engine

_TE_FILE = """\
\"\"\"Quantizers for Transformer Engine ({version} or newer), by megatron-fp8 diagnose: the format of each GEMM.

    name_linears(model)  # before the first forward: qfactory finds a linear by its name
    recipe = transformer_engine.common.recipe.CustomRecipe(qfactory=qfactory)

Linears that are not in PLAN stay in high precision. Not run: no Blackwell GPU was at hand.
\"\"\"

import torch
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import {classes}


def bf16(operand):
    return IdentityQuantizer()


{formats}PLAN = {{
{plan}}}  # linear: formats of fprop, dgrad and wgrad

READERS = {{"input": (0, 2), "weight": (0, 1), "grad_output": (1, 2)}}  # GEMMs that read it rowwise and columnwise


def quantizer(role, gemms):
    operand = getattr(role, "tensor_type", "")
    if operand not in READERS:  # an output, or the gradient of an input
        return IdentityQuantizer()
    rowwise, columnwise = (gemms[reader] for reader in READERS[operand])
    if rowwise is columnwise:
        return rowwise(operand)
    return HybridQuantizer(rowwise_quantizer=rowwise(operand), columnwise_quantizer=columnwise(operand))


def qfactory(role):
    return quantizer(role, PLAN.get(getattr(role, "name", ""), (bf16, bf16, bf16)))


def name_linears(model):
    for name, module in model.named_modules():
        if hasattr(module, "get_quantizer_roles"):
            module.name = name


# for one linear, as Megatron-Core's file names them


{factories}"""


def te_factories(plan: Plan, recipes: Recipes) -> str:
    """A Python file with quantizer factories for Transformer Engine. Raises ValueError with ``te_refusal``'s reason."""
    if (reason := te_refusal(recipes)) is not None:
        raise ValueError(reason)
    used = [fmt for fmt in recipes if any(fmt in gemms.values() for gemms in plan.values())]
    formats = "".join(_format_function(fmt, recipes[fmt]) for fmt in used)
    classes = {"HybridQuantizer", "IdentityQuantizer"} | set(re.findall(r"\w+Quantizer", formats))
    triples = {site: ", ".join(gemms[gemm] for gemm in GEMM_OPERANDS) for site, gemms in plan.items()}
    combinations = {factory_name(gemms): triples[site] for site, gemms in plan.items()}
    return _TE_FILE.format(
        version=TE_VERSION,
        classes=", ".join(sorted(classes)),
        formats=formats,
        plan="".join(f'    "{site}": ({triple}),\n' for site, triple in triples.items()),
        factories="\n\n".join(
            f"def {name}(role):\n    return quantizer(role, ({triple}))\n"
            for name, triple in combinations.items()
        ),
    )


def _format_function(fmt: str, recipe: Recipe) -> str:
    """The function of one format: operand -> a new quantizer."""
    calls = {role: _quantizer_call(rule) for role, rule in recipe.role_rules.items() if rule is not None}
    lines = [f"def {fmt}(operand):"]
    for role in ("weight", "grad_output"):
        if calls[role] != calls["input"]:
            lines += [f'    if operand == "{role}":', f"        return {calls[role]}"]
    return "\n".join([*lines, f"    return {calls['input']}", "", "", ""])


def _quantizer_call(rule: Rule) -> str:
    """Python text that makes the quantizer of a rule."""
    if rule.fmt is E2M1:
        flags = {
            "with_rht": rule.hadamard,
            "with_post_rht_amax": rule.hadamard,
            "with_2d_quantization": rule.granularity.symmetric,
            "stochastic_rounding": rule.stochastic,
        }
        return f"NVFP4Quantizer({', '.join(f'{name}={value}' for name, value in flags.items())})"
    dtype = f"DType.kFloat8{rule.fmt.name.upper()}"
    if rule.granularity == BLOCK_1X32:
        return f"MXFP8Quantizer({dtype})"
    scale = f"force_pow_2_scales={rule.scale == 'pow2'}, amax_epsilon={rule.epsilon}"
    if rule.granularity.is_tensor:
        return f'Float8CurrentScalingQuantizer({dtype}, torch.device("cuda"), {scale})'
    dimensions = 2 if rule.granularity.symmetric else 1
    return f"Float8BlockQuantizer({dtype}, rowwise=True, columnwise=True, {scale}, block_scaling_dim={dimensions})"

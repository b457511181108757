"""Resolves settings, a name and a device to a plan entry.

Each front end describes the user's request as ``SiteRequest``: Megatron's config in mcore/sites.py, an Fp8Config in
nn/config.py, the arguments of a product in nn/matmul.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ..backends import BACKENDS, LAYER_BACKENDS, choose_backend, warn_slow_backend
from ..files.terminal import print_rank_0
from ..kernels.cpu.library import missing_compiler
from ..recipe import RECIPES, Recipe, refuse_e5m2_twice
from .cast_spec import CastSpecs, products_of_casts
from .overrides import matching_overrides
from .site_plan import SitePlan, bf16_site, planned_site


@dataclass(frozen=True)
class SiteRequest:
    """A user's request for all linears of a model.

    Args:
        recipe: for all linears, with the user's options.
        named: those of overrides that name one, as ``named_recipes`` gives them.
        reason: why this recipe, for the report.
        overrides: as in plan/overrides.py.
        fp8_wgrad: False keeps wgrad in high precision.
        unquantized: roles that stay in high precision.
        backend: a backend's name, 'auto' or None.
        warn: a linear that cannot run as requested stays in high precision, with a warning and a report entry,
            instead of an error.
        prefix: prefix of these settings' names: 'fp8_' in Megatron's config.
        dtype: the name of the high precision.
        faster: the setting that makes gradients E4M3, which some GPUs multiply faster.
    """

    recipe: Recipe
    named: Mapping[str, Recipe] = field(default_factory=dict)
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
    request: SiteRequest,
    name: str,
    layer: int | None,
    device: torch.device,
    *,
    bf16_reason: str | None = None,
    layers: bool = False,
    brings_own: bool = False,
    also: tuple[str, ...] = (),
) -> SitePlan:
    """Returns the plan of one linear. Overrides by name come last, so they can put a layer back into FP8.

    Args:
        request: the user's.
        name: of the linear.
        layer: its global number, if it has one.
        device: where it runs.
        bf16_reason: why its layer stays in high precision, None if it does not.
        layers: whether backends with their own layers may be chosen.
        brings_own: whether the linear is such a backend's.
        also: other names that overrides may match, such as the name of its group of experts.

    Raises:
        ValueError: FP8 was requested and cannot run.
    """
    try:
        specs = cast_specs(request, name, bf16_reason, also)
        if specs.none_in_fp8:
            return bf16_site(name, layer, "; ".join(specs.reasons))
        products = products_of_casts(specs.operands()) if specs.edited else specs.recipe
        try:
            setting = f"{request.prefix}backend"
            backend, why = choose_backend(request.backend, device, products, layers=layers, setting=setting)
        except ValueError as error:
            if not specs.overridden:
                raise  # the request is the same for all linears: one name would mislead
            raise ValueError(f"{_with_reasons(name, specs)}: {error}") from error
        if brings_own != (backend.name in LAYER_BACKENDS):
            raise ValueError(
                f"{name} is {'a Transformer Engine layer' if brings_own else 'no Transformer Engine layer'}, and the"
                f" backend is {backend.name!r}: build the model from"
                " megatron_fp8.mcore.spec.get_gpt_layer_fp8_spec(config), which takes the layers of config.fp8_backend"
            )
    except ValueError as error:
        if not request.warn:
            raise
        plan = bf16_site(name, layer, f"{request.prefix}fallback: {error}", "fallback")
        warn_fallback(name, request.dtype, plan.reason)
        return plan
    warn_slow_backend(backend.name, device, products, request.faster)
    return _shared_plan(specs, backend.name, why).of(name, layer)


def cast_specs(
    request: SiteRequest, name: str, bf16_reason: str | None = None, also: tuple[str, ...] = ()
) -> CastSpecs:
    """Returns the operands of a linear of that name, on any backend; arguments and errors as ``resolve``'s."""
    asked = {"unquantized": request.unquantized, "fp8_wgrad": request.fp8_wgrad, "bf16_reason": bf16_reason}
    specs = _shared_specs(request.recipe, request.reason, **asked)
    for override in matching_overrides(name, request.overrides, also):
        specs = specs.after(override, _recipe_of_value(request, override.value), f"{request.prefix}overrides")
    if specs.edited:
        refuse_e5m2_twice(products_of_casts(specs.operands()), _with_reasons(name, specs))
    return specs


# Linears that no override names share both: a model with 100,000 linears makes as many look-ups.
_shared_specs = lru_cache(maxsize=256)(CastSpecs.of)


@lru_cache(maxsize=256)
def _shared_plan(specs: CastSpecs, backend: str, why: str) -> SitePlan:
    """The plan of a linear of any name with these specs, on a backend that was chosen for this reason."""
    reason = "; ".join(specs.reasons)
    return planned_site("", None, backend, f"{reason}; backend {why}" if reason else f"backend: {why}", specs)


def _with_reasons(name: str, specs: CastSpecs) -> str:
    """Returns a linear's name with its overrides' reasons, for an error message."""
    return f"{name} ({'; '.join(specs.reasons)})"


def _recipe_of_value(request: SiteRequest, value: Any) -> Recipe | None:
    """Returns the recipe that an override's value names, or None."""
    if isinstance(value, Recipe):
        return value
    return request.recipe if value == "fp8" else request.named.get(value)


def named_recipes(overrides: Mapping[str, Any], make: Callable[[str], Recipe]) -> dict[str, Recipe]:
    """Returns the recipes that overrides name, by name. ``make`` gives one with the user's options."""
    names = {value for value in overrides.values() if isinstance(value, str) and value in RECIPES}
    return {name: make(name) for name in names}


MX_BLOCK = 32


def warn_of_high_precision(plans: Iterable[SitePlan], remedy: str) -> None:
    """Prints a line, once, if gradients are E5M2 in MX blocks, where E4M3 would be better.

    Each block has its own scale and needs no wide range, and E4M3 has one more mantissa bit. Others saw training
    diverge with E5M2 (Megatron-Bridge #638, ROCm/Megatron-LM #100; arXiv 2506.08027 uses E4M3 for all tensors). For
    blocks of 128 reports disagree (TransformerEngine #2754), and nothing is printed.

    Args:
        remedy: the setting that makes gradients E4M3, as the caller's users write it.
    """
    for plan in plans:
        rule = plan.rules["grad_output"]
        if rule is not None and rule.fmt.name == "e5m2" and rule.granularity.cols == MX_BLOCK:
            print_rank_0(
                "megatron_fp8: MXFP8 does not need E5M2's range for gradients, and E4M3 has a mantissa bit more: try"
                f" {remedy} (docs/recipes.md)",
                once=True,
            )
            return


def warn_fallback(name: str, dtype: str, reason: str) -> None:
    """Prints a line, once, for a linear that stays in ``dtype`` because it cannot run as requested."""
    print_rank_0(f"megatron_fp8: {name} runs in {dtype}: {reason}", once=True)


def padded_note(plan: SitePlan, device: torch.device, n: int, k: int) -> str | None:
    """Returns the report's note for a weight [N, K] of this rank whose sizes the GPU's GEMM does not support.

    Its codes are copied to pad them, in every step. None for other weights.
    """
    backend = BACKENDS.get(plan.backend or "")
    padded_products = getattr(backend, "padded_products", None)
    if padded_products is None or not (gemms := padded_products(device, plan.products, n, k)):
        return None
    return f"K {k} x N {n} is not what the GPU's product takes: {', '.join(gemms)} copy codes, to pad them"


def warn_no_compiler(device: torch.device) -> None:
    """Prints a line, once, if linears run on a CPU without compiled kernels and there is no GPU."""
    if device.type == "cpu" and not torch.cuda.is_available() and (reason := missing_compiler()) is not None:
        print_rank_0(
            f"megatron_fp8: {reason}. Without compiled kernels a training step takes about twice as long, with the same"
            " codes and scales",
            once=True,
        )


def warn_padding(notes: Mapping[str, str], sites: int) -> None:
    """Prints a line, once, if some weights are padded.

    Args:
        notes: weight name -> note, for this rank's padded weights.
        sites: number of all sites of this rank.
    """
    if notes:
        name, note = next(iter(notes.items()))
        print_rank_0(
            f"megatron_fp8: {len(notes)} of this rank's {sites} GEMM sites have sizes that are padded ({name}:"
            f" {note}); multiples of 16 on each rank (of 128 in blocks, of 32 in mxfp8) cost nothing"
            " (docs/no_speed_up.md)",
            once=True,
        )

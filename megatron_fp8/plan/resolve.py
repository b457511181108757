"""What a linear runs in, and why: the one place where settings, a name and a device become an entry of the plan.

Each front end says what its user asked for as ``Asked``: Megatron's config in mcore/sites.py, an Fp8Config in
nn/config.py, the arguments of a product in nn/matmul.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..backends import LAYER_BACKENDS, choose_backend, say_what_is_slow
from ..recipe import Recipe
from .site_plan import SitePlan, bf16_site, fp8_site, matching_override


@dataclass(frozen=True)
class Asked:
    """What a user asks for, of all linears of a model alike.

    Args:
        recipe: the recipe of a name, with the user's options; of None, the one for all linears.
        reason: why that one, as the report will say it.
        overrides: globs of names -> 'bf16' or a recipe's name.
        fp8_wgrad: False keeps wgrad in high precision.
        unquantized: roles that stay in high precision.
        backend: one's name, 'auto' or None.
        warn: a linear that cannot run as asked is left in high precision, printed and reported, in place of an error.
        prefix: what the names of these settings begin with: 'fp8_' in Megatron's config.
        dtype: what high precision is called.
        faster: the setting that makes gradients E4M3, which some GPUs multiply faster.
    """

    recipe: Callable[[str | None], Recipe]
    reason: str = ""
    overrides: Mapping[str, str] = field(default_factory=dict)
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
) -> SitePlan:
    """The plan of one linear. Order: ``bf16_reason``; overrides by name, which therefore can put a layer back; recipe.

    Args:
        asked: what the user asked for.
        name: the linear's.
        layer: its global number, if it has one.
        device: where it runs.
        bf16_reason: why its layer stays in high precision, None if it does not.
        layers: whether backends that have layers of their own may be chosen.
        brings_own: whether the linear is one of such a backend's.

    Raises:
        ValueError: FP8 was asked for and cannot run.
    """
    override = matching_override(name, asked.overrides)
    if override is None and bf16_reason is not None:
        return bf16_site(name, layer, bf16_reason)
    if override is not None and override[1] == "bf16":
        return bf16_site(name, layer, f"{asked.prefix}overrides {override[0]!r}")
    reason = asked.reason if override is None else f"{asked.prefix}overrides {override[0]!r}"
    try:
        recipe = asked.recipe(None if override is None else override[1])
        backend, why = choose_backend(asked.backend, device, recipe, layers=layers)
        if brings_own != (backend.name in LAYER_BACKENDS):
            raise ValueError(
                f"{name} is {'a Transformer Engine layer' if brings_own else 'no Transformer Engine layer'}, and the"
                f" backend is {backend.name!r}: build the model from"
                " megatron_fp8.mcore.spec.get_gpt_layer_fp8_spec(config), which takes the layers of config.fp8_backend"
            )
    except ValueError as error:
        if not asked.warn:
            raise
        print(f"megatron_fp8: {name} runs in {asked.dtype}: {error}", file=sys.stderr)
        return bf16_site(name, layer, f"{asked.prefix}fallback: {error}")
    say_what_is_slow(backend.name, device, recipe, asked.faster)
    return fp8_site(
        name,
        layer,
        recipe,
        backend.name,
        f"{reason}; backend {why}" if reason else f"backend: {why}",
        fp8_wgrad=asked.fp8_wgrad,
        unquantized=asked.unquantized,
    )

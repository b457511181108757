"""The precision plan: for every GEMM site, what runs in which precision, and why. Settled when the model is built.

A site is one linear layer, named by its fully qualified module name. Its SitePlan is frozen; whatever changes the answer
(first and last layers in BF16, overrides by name, ``fp8_wgrad=False``, a role left in high precision) is applied when
the plan is made, and leaves its reason there. Nothing decides precision anywhere else, so the report cannot disagree
with what runs; only phases.py says in which iterations a plan is in force.

Rejected: an ambient context that layers ask "is this FP8?" at run time, as Transformer Engine has it. Recompute,
pipelines and a module called twice each meet the wrong ambient, in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from ..recipe import GEMM_OPERANDS, Recipe, Rule, recipe_name

Precision = Literal["fp8", "bf16"]


@dataclass(frozen=True)
class SitePlan:
    """One GEMM site's entry.

    Attributes:
        name: fully qualified module name; layer numbers are global, counted from 0.
        layer: global 0-based layer number, None outside the layers.
        precision: 'fp8' if any GEMM runs in FP8, else 'bf16' (the model's own dtype).
        recipe: None for a bf16 site.
        backend: backend name, None for a bf16 site.
        reason: why it is so.
        rules: role -> Rule, or None for a role that stays in high precision.
        gemms: 'fprop', 'dgrad', 'wgrad' -> precision.
    """

    name: str
    layer: int | None
    precision: Precision
    recipe: Recipe | None
    backend: str | None
    reason: str
    rules: Mapping[str, Rule | None] = field(default_factory=dict)
    gemms: Mapping[str, Precision] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for report.json."""
        return {
            "name": self.name,
            "layer": self.layer,
            "precision": self.precision,
            "recipe": None if self.recipe is None else recipe_name(self.recipe),
            "backend": self.backend,
            "roles": {role: None if rule is None else str(rule) for role, rule in self.rules.items()},
            "gemms": dict(self.gemms),
            "reason": self.reason,
        }


def fp8_site(
    name: str,
    layer: int | None,
    recipe: Recipe,
    backend: str,
    reason: str,
    *,
    fp8_wgrad: bool = True,
    unquantized: Collection[str] = (),
) -> SitePlan:
    """The plan of a site that runs in FP8 as ``recipe`` says; GEMMs with an unquantised operand run in bf16.

    Roles in ``unquantized`` stay in high precision whatever the recipe has for them. If that leaves no GEMM in FP8 it is
    a bf16 site, and nothing is quantised.
    """
    rules = {
        role: None if role in unquantized else recipe.rule(role)
        for role in ("input", "weight", "grad_output")
    }
    gemms: dict[str, Precision] = {
        gemm: "fp8" if rules[a] and rules[b] else "bf16" for gemm, (a, b) in GEMM_OPERANDS.items()
    }
    plain = [role for role, rule in rules.items() if rule is None]
    if plain:
        reason += f"; {', '.join(plain)} not quantised {'as asked' if unquantized else 'by the recipe'}"
    if not fp8_wgrad and gemms["wgrad"] == "fp8":
        gemms["wgrad"] = "bf16"
        reason += "; fp8_wgrad=False: wgrad in high precision, which saves the input unquantised"
    if "fp8" not in gemms.values():
        return bf16_site(name, layer, reason)
    return SitePlan(name, layer, "fp8", recipe, backend, reason, rules, gemms)


def bf16_site(name: str, layer: int | None, reason: str) -> SitePlan:
    """The plan of a site that runs in the model's own dtype."""
    gemms: dict[str, Precision] = dict.fromkeys(GEMM_OPERANDS, "bf16")
    return SitePlan(
        name, layer, "bf16", None, None, reason, dict.fromkeys(("input", "weight", "grad_output")), gemms
    )


def matching_override(name: str, overrides: Mapping[str, str]) -> tuple[str, str] | None:
    """(glob, value) of the last override whose glob matches the name or its last dotted part."""
    found = None
    for pattern, value in overrides.items():
        if fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern):
            found = (pattern, value)
    return found


def check_overrides_match(overrides: Mapping[str, str], names: Iterable[str]) -> None:
    """ValueError for a glob that matches no site: a typing error must not pass as a setting.

    ``names`` are the sites of the whole model, over all pipeline stages.
    """
    names = list(names)
    for pattern in overrides:
        if not any(matching_override(name, {pattern: ""}) for name in names):
            raise ValueError(
                f"fp8_overrides: {pattern!r} matches no GEMM site; the sites are {', '.join(names[:6])}, ..."
            )


FALLBACK = "fp8_fallback: "
"""What the reason of a site begins with that cannot run as asked and, as the user allowed, runs in BF16."""


def check_something_left(plans: Iterable[tuple[str, str]]) -> None:
    """ValueError if FP8 was asked for and no site runs in it, unless a fallback was allowed.

    ``plans``: (precision, reason) of every site of the whole model; nothing is said of a model without any.
    """
    plans = list(plans)
    reasons = list(dict.fromkeys(reason for _, reason in plans))
    if not plans or any(precision == "fp8" for precision, _ in plans):
        return
    if not any(reason.startswith(FALLBACK) for reason in reasons):
        more = ", ..." if len(reasons) > 3 else ""
        raise ValueError(
            f"the settings leave none of {len(plans)} GEMM sites in FP8 ({', '.join(reasons[:3])}{more}): change them, or"
            " set fp8=None to train in BF16."
        )
